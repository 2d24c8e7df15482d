"""Rules of Lark grammars that derive no finite text are found, others are not."""

import time

import pytest

from dflash_jax.tool_parsers.grammar_bounds import endless_rule, regexes


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: "a" start', "start"),
        ("start: start", "start"),
        ('start: "x" b\nb: b', "b"),
        ('start: "x" b?\nb: b "y"', "b"),
        ('start: ("x" | b)\nb: [b]', None),
        ('start: "x"\n  | c\nc: "y" c', "c"),
        ('start: b~0..3 "x"\nb: b', "b"),
        ("start: x{2}\nx: y+\ny: (x)", "y"),
        ('start: x ~ 2\nx: "a"', None),
        ('start: "|" start "|"', "start"),
        ('start: x y\nx: "a"\ny: x y', "y"),
        ('start: "a"\nunused: unused', None),
        ('start: (a{2,3})+ // c\na[suffix="x"]: /.*/ -> foo\n%ignore /x/\n', None),
        ('start: %json {"a": "start: start"} x\nx: "1".."2" x*', None),
        ('start: ?b\n?b: "x" | b b', None),
        ("start: A\nA: /b/ & ~/c/", None),
        ("start: <|im_start|> @other x\n", None),
        ("start: 'not Lark", None),
    ],
)
def test_rules_that_never_end_are_found(grammar: str, rule: str | None) -> None:
    assert endless_rule(grammar) == rule


def test_long_chains_take_linear_time() -> None:
    chain = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "x"'])
    deep = "start: " + "(" * 5000 + '"x"' + ")" * 5000
    begun = time.process_time()
    assert endless_rule(chain) is None
    assert endless_rule(deep) is None
    assert endless_rule(chain.replace('"x"', "r0")) == "r3000"
    assert time.process_time() - begun < 10


def test_regular_expressions_of_a_grammar_are_found() -> None:
    assert regexes('start: /a\\/b/i | /c/ x\nx: "/d/" // /e/') == ["/a\\/b/i", "/c/"]
