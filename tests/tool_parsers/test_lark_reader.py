"""Schemas and regular expressions of Lark grammars are found; nesting exhausts no stack."""

import time

from dflash_jax.tool_parsers.lark_reader import regexes, with_schemas


def test_regular_expressions_of_a_grammar_are_found() -> None:
    assert regexes('start: /a\\/b/i | /c/ x\nx: "/d/" // /e/') == ["/a\\/b/i", "/c/"]
    assert regexes("start: 'not Lark /a/") == []


def test_schemas_of_a_grammar_are_replaced_and_all_else_stays() -> None:
    grammar = 'start: "%json {}"  %json {"a": 1} x // %json {}\nx: %json\n {"b": [2]}'
    changed = with_schemas(grammar, lambda schema: [schema])
    assert changed == grammar.replace(' {"a": 1}', ' [{"a": 1}]').replace(
        '\n {"b": [2]}', ' [{"b": [2]}]'
    )
    for broken in ("start: %json {", "start: 'x", "start: %json " + "[" * 100_000 + "]" * 100_000):
        assert with_schemas(broken, lambda schema: 0) == broken


def test_long_and_deep_grammars_take_linear_time() -> None:
    begun = time.process_time()
    for grammar in ('start: /a/ "b"\n' * 50_000, "start: " + "(" * 50_000 + "/a/" + ")" * 50_000):
        assert regexes(grammar) == ["/a/"]
    assert time.process_time() - begun < 10
