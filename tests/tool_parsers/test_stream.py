"""Outputs of every family, split at every position: the same reasoning, content and calls."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.tool_parsers import SYNTAXES, malformed_calls
from dflash_jax.tool_parsers.calls import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from dflash_jax.tool_parsers.stream import OutputParser
from dflash_jax.tool_parsers.syntax import CallState
from dflash_jax.tool_parsers.tool_schema import Tool

TOOLS = [
    Tool("read", {"properties": {"path": {"type": "string"}, "count": {"type": "integer"}}}),
    Tool("stop", {}),
]
READ = ("read", {"path": 'a"b\n<c>', "count": 3})
Read = tuple[str, str, list[tuple[str, object, bool]], bool]


def read(
    family: str, pieces: Sequence[str], *, tools: Sequence[Tool] = TOOLS, thinking: bool = False
) -> Read:
    """Return reasoning, content, calls (name, arguments, complete) and whether a call is open."""
    return read_by(OutputParser(SYNTAXES[family], tools, thinking=thinking), pieces)


def read_by(parser: OutputParser, pieces: Sequence[str]) -> Read:
    """Return the same for a given parser."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish()
    calls: list[list] = []
    for event in events:
        match event:
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append([name, "", False])
            case ToolCallDelta(index, text):
                assert not calls[index][2]
                calls[index][1] += text
            case ToolCallEnd(index):
                calls[index] = [calls[index][0], json.loads(calls[index][1] or "{}"), True]
    thoughts = "".join(e.text for e in events if isinstance(e, Thinking))
    content = "".join(e.text for e in events if isinstance(e, Content))
    return thoughts, content, [tuple(c) for c in calls], parser.unfinished


def thought(family: str, text: str) -> str:
    found = SYNTAXES[family].thought
    return found.opening + text + found.closing if found else ""


@pytest.mark.parametrize("family", sorted(SYNTAXES))
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_thought_a_preamble_and_two_calls(family: str, step: int) -> None:
    syntax = SYNTAXES[family]
    calls = [READ, ("stop", {})]
    preamble = "Let me look:"
    if family == "harmony":
        preamble = f"<|start|>assistant<|channel|>commentary<|message|>{preamble}<|end|>"
    raw = thought(family, "hm") + preamble
    raw += "".join("\n" + syntax.render(name, arguments) for name, arguments in calls)
    raw = raw.replace("\n<|start|>", "<|start|>")
    thoughts, content, found, unfinished = read(
        family, [raw[i : i + step] for i in range(0, len(raw), step)]
    )
    assert thoughts == ("hm" if syntax.thought else "")
    assert content == "Let me look:"
    assert found == [(name, arguments, True) for name, arguments in calls]
    assert not unfinished


@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_what_recovery_begins_is_a_call_once_the_model_ends_it(family: str) -> None:
    syntax = SYNTAXES[family]
    whole = syntax.render("read", {"path": "x"})
    begun = syntax.begin("read", "path").strip()
    if family == "harmony":
        whole = "<|end|>" + whole
    value = whole.split("x")[0][-8:]
    rest = whole[whole.index(value) + len(value) :]
    ending = {"qwen_xml": "x\n</parameter>\n</function>"}.get(family)
    joint = {"qwen_xml": "\n", "hermes": ' "', "llama": ' "', "harmony": ' "', "gemma4": '<|"|>'}
    raw = "Let me look:\n" + begun + joint[family] + (ending or rest)
    _, content, found, _ = read(family, list(raw))
    assert content == "Let me look:"
    assert found == [("read", {"path": "x"}, True)]


@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_a_call_that_is_cut_off_is_not_complete_and_leaks_nothing(family: str) -> None:
    raw = SYNTAXES[family].render(*READ)
    for cut in range(1, raw.rindex("3") + 2):
        _, content, found, unfinished = read(family, [raw[:cut]])
        assert content in ("", raw[:cut])
        assert content == "" or not found
        assert not [c for c in found if c[2]], raw[:cut]
        assert unfinished or not found


@pytest.mark.parametrize("family", sorted(SYNTAXES))
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_T22_a_call_of_an_undeclared_tool_is_passed_on(family: str, step: int) -> None:
    """If such calls were dropped, the caller would have nothing to answer."""
    raw = "So: " + SYNTAXES[family].render("other", {"path": "x"})
    if family == "llama":
        raw = raw.replace("So: ", "So:\n")
    parser = OutputParser(SYNTAXES[family], TOOLS)
    _, content, found, unfinished = read_by(
        parser, [raw[i : i + step] for i in range(0, len(raw), step)]
    )
    assert (content, unfinished) == ("So:", False)
    assert found == [("other", {"path": "x"}, True)]
    assert (parser.calls, parser.undeclared, parser.unreadable) == (1, ["other"], 0)


@pytest.mark.parametrize("family", sorted(set(SYNTAXES) - {"llama"}))
def test_a_call_of_an_undeclared_tool_is_held_until_it_is_complete(family: str) -> None:
    raw = SYNTAXES[family].render("other", {"path": "x"})
    parser = OutputParser(SYNTAXES[family], TOOLS)
    events = [parser.push(c) for c in raw]
    assert sum(map(bool, events)) == 1
    parser = OutputParser(SYNTAXES[family], TOOLS)
    cut = raw.index("x") + 1
    assert parser.push(raw[:cut]) + parser.finish() == []
    assert (parser.calls, parser.unfinished) == (0, True)


def test_names_that_no_tool_can_have_are_text() -> None:
    for name in ("", "a b", "n" * 129, "rm -rf"):
        raw = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        parser = OutputParser(SYNTAXES["hermes"], TOOLS)
        assert read_by(parser, list(raw)) == ("", raw, [], False)
        assert (parser.undeclared, parser.unreadable) == ([], 1)


def test_where_a_grammar_says_what_comes_only_declared_tools_are_called() -> None:
    raw = '{"name": "other", "parameters": {"path": "x"}}'
    parser = OutputParser(SYNTAXES["llama"], TOOLS, lenient=False)
    assert read_by(parser, list(raw)) == ("", raw, [], False)


def test_json_that_is_no_call_is_content_where_calls_have_no_tags() -> None:
    for raw in (
        '{"name": "Ann", "age": 3}',
        'So: {"name": "Ann", "age": 3}, and so on',
        '{"name": "other", "parameters": "x"}',
        '{"name": "other", "parameters": {"path": "x"}, "age": 3}',
        '{"name": "other", "version": {"tool": {"name": "read"}}}',
        '{"name": 3}',
        'a {"name"',
    ):
        for step in (1, 1000):
            found = read("llama", [raw[i : i + step] for i in range(0, len(raw), step)])
            assert found == ("", raw, [], False)
    assert (
        read("llama", ['{"name": "read", x'])[1] == '{"name": "read", x'
    )  # it started like a call, too


def test_arguments_arrive_while_they_are_written() -> None:
    parser = OutputParser(SYNTAXES["hermes"], TOOLS)
    parser.push('<tool_call>\n{"name": "read", "arguments": {"pa')
    assert parser.push('th": "ab') == [ToolCallDelta(0, 'th": "ab')]


def test_arguments_before_the_name_and_arguments_in_a_string() -> None:
    raw = '<tool_call>{"arguments": {"path": "x"}, "name": "read"}</tool_call>'
    assert read("hermes", [raw])[2] == [("read", {"path": "x"}, True)]
    raw = '<tool_call>{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}</tool_call>'
    assert read("hermes", [raw])[2] == [("read", {"path": "x"}, True)]


def test_without_tools_calls_are_text() -> None:
    raw = SYNTAXES["hermes"].render("read", {})
    assert read("hermes", [raw], tools=())[1] == raw


def test_a_thought_the_prompt_opened_and_one_that_never_ends() -> None:
    assert read("hermes", ["hm\n</think>\n\nYes "], thinking=True)[:2] == ("hm\n", "Yes ")
    assert read("hermes", ["hm <tool_call>"], thinking=True) == ("hm <tool_call>", "", [], False)


def test_values_of_parameters_have_the_declared_types() -> None:
    raw = "<function=read>\n<parameter=path>\n12\n</parameter>\n<parameter=count>\n12\n"
    raw += "</parameter>\n</function>\n</tool_call>"
    assert read("qwen_xml", [raw]) == ("", "", [("read", {"path": "12", "count": 12}, True)], False)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(SYNTAXES)))
def test_any_mixture_of_markup_is_read_alike_however_it_is_cut(
    data: st.DataObject, family: str
) -> None:
    syntax = SYNTAXES[family]
    words = [
        *syntax.opens,
        *syntax.closes,
        syntax.begin("f", None),
        syntax.render(*READ),
        "{",
        '"',
        "}",
        "a",
    ]
    words += ["<|message|>", "<parameter=path>", "\n", " ", "\\", thought(family, "x")]
    words += [
        *malformed_calls.OPENS,
        *malformed_calls.BARE_OPENS,
        "call:",
        "read",
        "<read>",
        "<arg_key>",
        "=",
        ")",
        "call:read{",
    ]
    words += ["<tool_call>\n<function=read>\n", "\n</parameter>\n", "\n<parameter=count>\n3"]
    raw = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    whole = read_lenient(family, [raw])
    assert read_lenient(family, list(raw)) == whole


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(set(SYNTAXES) - {"harmony"})))
def test_no_output_is_lost(data: st.DataObject, family: str) -> None:
    syntax = SYNTAXES[family]
    words = [*syntax.opens, *syntax.closes, syntax.render("other", {"a": 1}), "<tool_call>", "a"]
    words += [
        *malformed_calls.CLOSES,
        *malformed_calls.BARE_OPENS,
        "{",
        "}",
        '"read"',
        "\n",
        "<function=",
        "call:read{",
    ]
    raw = "".join(data.draw(st.lists(st.sampled_from(words), max_size=6)))
    parser = OutputParser(syntax, TOOLS)
    events = parser.push(raw) + parser.finish() + parser.unfinished_call()
    given_ = "".join(e.text for e in events if isinstance(e, Content))
    assert given_.strip() or any(isinstance(e, ToolCallEnd) for e in events) or not raw.strip()


def read_lenient(family: str, pieces: Sequence[str]) -> list[Event]:
    parser = OutputParser(SYNTAXES[family], TOOLS)
    events = [e for piece in pieces for e in parser.push(piece)] + parser.finish()
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Thinking | Content) and type(last) is type(event):
            merged[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            merged[-1] = ToolCallDelta(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "read", "arguments": {"path": "a"}\n', {"path": "a"}),  # a brace is missing
        ('{"name": "stop"}', {}),
        ('{"name": "stop", "arguments": null', {}),
        ('{"name": "read", "arguments": {"path": "a"}, "arguments": {"path": "b"}}', {"path": "a"}),
    ],
)
def test_slips_of_a_model_leak_nothing_and_leave_one_json_object(
    body: str, arguments: dict[str, str]
) -> None:
    raw = f"<tool_call>\n{body}</tool_call>"
    for step in (1, 1000):
        _, content, calls, unfinished = read(
            "hermes", [raw[i : i + step] for i in range(0, len(raw), step)]
        )
        assert (content, unfinished) == ("", False)
        assert [call[1:] for call in calls] == [(arguments, True)]
    events = OutputParser(SYNTAXES["hermes"], TOOLS).push(raw)
    written = "".join(event.text for event in events if isinstance(event, ToolCallDelta))
    assert json.loads(written) == arguments


def stopped(family: str, raw: str, stop: list[str], step: int = 1) -> tuple[Read, str | None]:
    """Parse a text in pieces of one size; return the result and the stop string that ended it."""
    parser = OutputParser(SYNTAXES[family], TOOLS, stop=stop)
    found = read_by(parser, [raw[i : i + step] for i in range(0, len(raw), step)])
    return found, parser.stopped_by


@pytest.mark.parametrize("family", sorted(SYNTAXES))
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_stop_strings_do_not_act_in_calls(family: str, step: int) -> None:
    call = SYNTAXES[family].render("read", {"path": "a STOP b", "count": 3})
    inside = ["STOP", "path", "read", ":", "a"]
    (_, content, calls, unfinished), by = stopped(family, call, inside, step)
    assert (content, unfinished, by) == ("", False, None)
    assert calls == [("read", {"path": "a STOP b", "count": 3}, True)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stop_string_does_not_reach_over_a_calls_border(step: int) -> None:
    call = SYNTAXES["hermes"].render(*READ)
    begin = "Look: <" + call + "so"
    for stop in (": <<", "<tool_call>", "<<tool", ">so", "</tool_call>"):
        (_, content, calls, _), by = stopped("hermes", begin, [stop], step)
        assert (content, calls, by) == ("Look: <so", [(*READ, True)], None)
    two = f"{call}\n{call}\n\nDone. STOP and more"  # white space between calls is not shown
    (_, content, calls, _), by = stopped("hermes", two, ["\n", "STOP"], step)
    assert (content, len(calls), by) == ("Done.", 2, "STOP")


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_stop_strings_act_in_thoughts_and_content(step: int) -> None:
    raw = "<think>\nhm STOP x\n</think>\n\nYes"
    (thoughts, content, _, _), by = stopped("hermes", raw, ["STOP"], step)
    assert (thoughts, content, by) == ("hm ", "", "STOP")
    raw = "<think>\nhm\n</think>\n\nYes. STOP" + SYNTAXES["hermes"].render(*READ)
    (thoughts, content, calls, _), by = stopped("hermes", raw, [". STOP", "x"], step)
    assert (thoughts, content, calls, by) == ("hm\n", "Yes", [], ". STOP")
    (_, content, _, _), by = stopped("llama", '{"name": STOP b"}', ["STOP"], step)
    assert (content, by) == ('{"name": ', "STOP")  # it was not a call


def test_harmonys_arguments_that_are_no_json_are_content() -> None:
    """They must not be lost."""
    begun = SYNTAXES["harmony"].begin("read", None)
    raw = begun + '"a\nb"<|call|>' + SYNTAXES["harmony"].render(*READ)
    _, content, found, unfinished = read("harmony", list(raw))
    assert (content, unfinished) == ('"a\nb"', False)
    assert [call[2] for call in found] == [False, True]


P, N = "<parameter=path>\nx\n</parameter>\n", "<parameter=count>\n3\n</parameter>\n"
BOTH = {"path": "x", "count": 3}
MARKUP = "a\n<parameter=other>\nb\n</function>\nc <parameter=count> <tool_call></tool_call>\nd"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (P + N + "</tool_call>", BOTH),  # no </function>
        ("</tool_call>", {}),
        (P.replace("</parameter>\n", "") + N + "</function>\n</tool_call>", BOTH),
        (P + N.replace("</parameter>\n", "") + "</function>\n</tool_call>", BOTH),
        (P + N.replace("</parameter>\n", "") + "</function>", BOTH),
        (P + N.replace("</parameter>\n", "") + "</tool_call>", BOTH),
        (P + N.replace("</parameter>\n", "") + "</function>\nSo much.", BOTH),
        (P.replace("x", MARKUP) + "</function>\n</tool_call>", {"path": MARKUP}),
    ],
)
def test_closing_tags_that_a_model_forgot(
    body: str, arguments: dict[str, object], step: int
) -> None:
    call = f"<tool_call>\n<function=read>\n{body}"
    for raw, calls in ((call, 1), (f"{call}\n{call}", 2)):
        if calls == 2 and not body.endswith("</tool_call>"):
            continue
        _, _, found, unfinished = read(
            "qwen_xml", [raw[i : i + step] for i in range(0, len(raw), step)]
        )
        assert found == [("read", arguments, True)] * calls
        assert not unfinished


def test_a_bare_function_needs_its_own_end() -> None:
    for body in (P, P + "</tool_call>", P.replace("</parameter>\n", "") + "</tool_call>"):
        found = read("qwen_xml", [f"<function=read>\n{body}"])[2]
        assert not [call for call in found if call[2]]
    raw = f"<function=read>\n{P.replace('</parameter>', '')}</function>\n</tool_call>\nDone."
    assert read("qwen_xml", [raw]) == ("", "Done.", [("read", {"path": "x\n"}, True)], False)


TAGGED = sorted(set(SYNTAXES) - {"harmony"})
X3 = {"path": "x, y", "count": 3}


def test_calls_in_the_forms_of_other_families() -> None:
    pairs = "<arg_key>path</arg_key>\n<arg_value>x, y</arg_value>\n<arg_key>count</arg_key>"
    blocks = "<parameter=path>\nx, y\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
    body = '"name": "read", "arguments": {"path": "x, y", "count": 3}}'
    for family, form, step in itertools.product(
        TAGGED,
        (
            f"<tool_call>read\n{pairs}\n<arg_value>3</arg_value>\n</tool_call>",
            f"<tool_call>\n<function=read>\n{blocks}</function>\n</tool_call>",
            f"<function=read>\n{blocks}</function>",
            "<function=read(path='x, y', count=3)></function>",
            '<tool_call><function=read(path="x, y", count=3)</function></tool_call>',
            f"<read>\n{blocks}</function>",
            f"<read>{blocks}</read>",
            f"<tool_code>{{{body}</tool_code>",
            f"<tool_call>{{{body}</tool_call>",
            'call:read{path: "x, y", count: 3}',
            "call:default_api:read{path:<|\"|>x, y<|\"|>,'count':3}",
            "{" + body,
            "{\n  " + body.replace("arguments", "parameters")[:-1] + "\n}",
        ),
        (1, 5, 1000),
    ):
        raw = f"So:\n{form}\nWell."
        found = read(family, [raw[i : i + step] for i in range(0, len(raw), step)])
        assert found == ("", "So:Well.", [("read", X3, True)], False), (family, form, step)


def test_a_name_alone_in_a_wrapper_is_a_call_without_arguments() -> None:
    assert read("hermes", list("<tool_call>stop</tool_call>"))[2] == [("stop", {}, True)]


@pytest.mark.parametrize("family", sorted(set(SYNTAXES) - {"harmony", "llama"}))
def test_text_that_only_looks_like_a_call_is_text(family: str) -> None:
    call = '{"name": "read", "arguments": {"path": "x"}}'
    for raw in (
        f"Such as {call}, say.",
        f"Such as:\n```json\n{call}\n```\nSo.",
        '{"name": "other", "arguments": {"path": "x"}}',
        '{"name": "read", "version": 3}',
        '{"name": "read", "arguments": 3}',
        '{"name": "read"}',
        '{"name": "re',
        "recall:read{path:x} and call: me, call:other{a:b} or call:read",
        "<read> the book </read> and <read",
        "<stop><b>",
        '{"path": "x", "count": 3}',  # there are two tools
        "{",
    ):
        for step in (1, 1000):
            found = read(family, [raw[i : i + step] for i in range(0, len(raw), step)])
            assert found == ("", raw, [], False), (raw, step)
    for step in (1, 1000):  # certainly a call, but unreadable
        raw = "<tool_code>print(1)</tool_code>"
        parser = OutputParser(SYNTAXES[family], TOOLS)
        found = read_by(parser, [raw[i : i + step] for i in range(0, len(raw), step)])
        assert found == ("", raw, [], False)
        assert parser.unreadable == 1


OBJECT = '{"name": "read", "arguments": {"path": "x"}}'
STOP = '{"name": "stop", "parameters": {}}'


@pytest.mark.parametrize(
    ("raw", "content", "paths"),
    [
        (f"```json\n{OBJECT}\n```", "", ["x"]),
        (f"I do it:\n\n```\n{OBJECT}\n```\n", "I do it:", ["x"]),
        (f"```json\n{OBJECT}", "", ["x"]),
        (f"```tool_call\n{OBJECT}\n{STOP}\n```", "", ["x", None]),
        (f"```json\n[{OBJECT},\n {STOP}]\n```", "", ["x", None]),
        (f"```json\n{OBJECT}\n```\n\n```json\n{STOP}\n```", "", ["x", None]),
        (f"```xml\n<tool_call>\n{OBJECT}\n</tool_call>\n```", "", ["x"]),
        (f"```py\nx = 1\n```\n```json\n{OBJECT}\n```", "```py\nx = 1\n```", ["x"]),
        (f"An example:\n```json\n{OBJECT}\n```", None, []),
        (f"```json\n{OBJECT}\n```\nIt has 3 lines.", None, []),
        (f"```json\n{OBJECT}\n```\n\n```py\nx = 1\n```", None, []),
        (f"So ```json\n{OBJECT}\n```", None, []),
        ('```json\n{"name": "other", "arguments": {}}\n```', None, []),
        ('```json\n{"name": "read", "arguments": {}}\n```', None, []),  # no path
        ('```json\n{"name": "read", "arguments": {"path": x}}\n```', None, []),
        ('```json\n{"name": "read", "arguments": {"path": "x"}, "id": 3}\n```', None, []),
        ('```json\n{"name": "Ann", "age": 3}\n```', None, []),
        ("```json\n[]\n```", None, []),
        (f"```json\n{OBJECT[:30]}", None, []),
        ("```", None, []),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "gemma4"])
def test_a_fence_that_ends_the_output_and_holds_only_calls_is_calls(
    raw: str, content: str | None, paths: list[str | None], family: str
) -> None:
    tools = [Tool("read", {**TOOLS[0].parameters, "required": ["path"]}), TOOLS[1]]
    for step in (1, 3, 1000):
        pieces = [raw[i : i + step] for i in range(0, len(raw), step)]
        for fenced in (lambda before: "example" not in before, None):
            parser = OutputParser(SYNTAXES[family], tools, fenced=fenced)
            _, said, calls, unfinished = read_by(parser, pieces)
            wanted = paths if fenced else []
            if content is not None and fenced is None and "<tool_call>" in raw:
                continue  # whose tags are read wherever they are
            assert [arguments.get("path") for _, arguments, _ in calls] == wanted
            assert said == (content if fenced and content is not None else raw)
            assert not unfinished


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_the_arguments_of_the_only_tool_are_a_call_if_nothing_else_is_said(step: int) -> None:
    def said(raw: str, **options: bool) -> Read:
        only = [Tool("read", {**TOOLS[0].parameters, "required": ["path"]})]
        parser = OutputParser(SYNTAXES["hermes"], only, **options)
        return read_by(parser, [raw[i : i + step] for i in range(0, len(raw), step)])

    raw = '<think>\nhm\n</think>\n\n{"path": "x", "count": 3}\n'
    assert said(raw) == ("hm\n", "", [("read", {"path": "x", "count": 3}, True)], False)
    assert said(raw, lenient=False) == ("hm\n", raw[raw.index("{") :], [], False)
    for other in (
        '{"count": 3}',
        '{"path": 3}',
        '{"path": "x", "other": 3}',
        '{"path": "x"} So.',
        'So: {"path": "x"}',
        '{"path": "x"',
        "{}",
        '{"path": "x"}\n{"path": "y"}',
    ):
        assert said(other) == ("", other, [], False)
    # Text that cannot be arguments is not held back.
    parser = OutputParser(SYNTAXES["hermes"], [Tool("read", TOOLS[0].parameters)])
    assert parser.push('{"other": "and') == [Content('{"other": "and')]


def test_of_a_long_value_only_the_end_is_looked_at_again() -> None:
    for value, again in (
        ("code\n" * 1000, ""),
        ("a < b\n" * 1000, ""),
        ("code\n</div>\nmore", ""),
        ("code\n</div>\n", "</div>\n"),
        ("code\n</function>\n<to", "</function>\n<to"),
        ("code\n<parameter=pa", "<parameter=pa"),
    ):
        assert value[malformed_calls.rescan_from(value, 0) :] == again


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_text_about_tags_is_text(step: int) -> None:
    for raw in (
        "Write `<tool_call>` before it, then go on.",
        "The <tool_call> tag\n\nhas a name in it (at times).",
        "Use <function=NAME> and blocks, or `<function=` alone.",
    ):
        for family in ("hermes", "qwen_xml", "gemma4"):
            found = read(family, [raw[i : i + step] for i in range(0, len(raw), step)])
            assert found == ("", raw, [], False), (family, raw)
    raw = "See `<tool_call>`. STOP here"
    assert stopped("hermes", raw, ["STOP"], step)[0][1] == "See `<tool_call>`. "


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("family", "before", "shown"),
    [
        ("hermes", "<tool_call>\n", ""),
        ("hermes", "<tool_call>\n</tool_call>\n", ""),
        ("hermes", '<tool_call>\n{"name": bad\n', None),
        ("hermes", '<tool_call>\n{"name": bad}\n</tool_call>\n', None),
        ("hermes", '<tool_call>\n{"name": "read", "arguments": {"path": "a"}, bad}\n', None),
        ("hermes", '{"name": "a\n', '{"name": "a'),
        ("qwen_xml", "<tool_call>\n", ""),
        ("qwen_xml", "<tool_call>\n<function=other>\nbad\n", None),
        ("gemma4", "<|tool_call>call:read{path<tool_call|>", None),
        ("gemma4", "<|tool_call>call:read<tool_call|>", None),
        ("gemma4", "<|tool_call>call:read{<tool_call|>", None),
    ],
)
def test_a_call_behind_a_broken_one_is_read(
    family: str, before: str, shown: str | None, step: int
) -> None:
    """The broken call becomes content, unchanged."""
    raw = before + SYNTAXES[family].render(*READ)
    parser = OutputParser(SYNTAXES[family], TOOLS)
    _, content, calls, unfinished = read_by(
        parser, [raw[i : i + step] for i in range(0, len(raw), step)]
    )
    assert [call for call in calls if call[2]] == [(*READ, True)]
    assert (content, unfinished) == (before.rstrip() if shown is None else shown, False)
    assert parser.unreadable == (shown is None)


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_call_that_breaks_behind_its_name_is_content_as_well(step: int) -> None:
    """A stream has already started the call, which is never completed."""
    raw = (
        'So:\n<tool_call>\n{"name": "read", "arguments": {"path": "a\nb"}, oops\n</tool_call>\nOk.'
    )
    parser = OutputParser(SYNTAXES["hermes"], TOOLS)
    events = [e for i in range(0, len(raw), step) for e in parser.push(raw[i : i + step])]
    events += parser.finish()
    content = "".join(e.text for e in events if isinstance(e, Content))
    assert content == raw
    assert [e for e in events if isinstance(e, ToolCallEnd)] == []
    assert (parser.calls, parser.unreadable) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [
        "<tool_call>",
        '<tool_call>\n{"na',
        '<tool_call>\n{"name": "read", "arguments": {"path": "a\n',
        '<tool_call>\n{"name": "other", "arguments": {"path": "a',
    ],
)
def test_an_output_that_ends_inside_a_call_has_its_text(raw: str) -> None:
    """It is shown if the model ended it, and left out if a limit cut it (T21)."""
    for step in (1, 1000):
        parser = OutputParser(SYNTAXES["hermes"], TOOLS)
        text = f"So:\n{raw}"
        _, content, _, unfinished = read_by(
            parser, [text[i : i + step] for i in range(0, len(text), step)]
        )
        assert unfinished
        rest = "".join(e.text for e in parser.unfinished_call() if isinstance(e, Content))
        assert content + rest == text.rstrip()
        assert parser.unfinished_call() == []
        assert parser.unreadable == 1


@pytest.mark.parametrize("raw", ["</tool_call>", "<tool_call></tool_call>", "\n</function>\n"])
def test_markup_is_shown_where_an_output_holds_nothing_else(raw: str) -> None:
    assert read("hermes", list(raw))[1].strip() == raw.strip()
    assert read("hermes", list(raw + "So."))[1].strip() == "So."


def test_arguments_are_one_json_object_whatever_stands_in_them() -> None:
    for raw, arguments in (
        ('<tool_call>{"name": "stop", "arguments": null}</tool_call>', {}),
        ('<tool_call>{"name": "stop", "arguments": ""}</tool_call>', {}),
        ('<tool_call>{"name": "stop", "name": "read", "arguments": {}}</tool_call>', {}),
        ("call:stop{a:NaN,b:1e999,c:[-Infinity]}", {"a": "NaN", "b": "1e999", "c": ["-Infinity"]}),
        (f"call:stop{{a:{'9' * 5000}}}", {"a": "9" * 5000}),
        (
            '<tool_call>{"name": "stop", "arguments": {"a\tb":\n"c\n\\\\\nd\x00"}}</tool_call>',
            {"a\tb": "c\n\\\nd\0"},
        ),
        ("call:read{path:1.10,count:3}", {"path": "1.10", "count": 3}),
        ('call:stop{<|"|>a:b<|"|>:{"c d:e": 1}}', {"a:b": {"c d:e": 1}}),
        ('call:stop{a:"\\ud800"}', {"a": "\ud800"}),
        (
            '<tool_call>{"name": "stop", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
            {"a": "\ud800"},
        ),
    ):
        for family in ("hermes", "gemma4"):
            parser = OutputParser(SYNTAXES[family], TOOLS)
            events = [event for c in raw for event in parser.push(c)]
            assert [type(e) for e in events if not isinstance(e, ToolCallDelta)] == [
                ToolCallStart,
                ToolCallEnd,
            ]
            text = "".join(e.text for e in events if isinstance(e, ToolCallDelta))
            text.encode()  # as when it is sent
            assert json.loads(text, parse_constant=float) == arguments, raw


def test_harmonys_arguments_may_be_missing() -> None:
    begun = SYNTAXES["harmony"].begin("stop", None)
    answer = "<|start|>assistant<|channel|>final<|message|>ok"
    for written in ("", "null", "{}"):
        assert read("harmony", list(f"{begun}{written}<|call|>"))[2] == [("stop", {}, True)]
    assert read("harmony", list(f"{begun}a b<|end|>{answer}")) == ("", "a bok", [], False)


@pytest.mark.parametrize("step", [1, 7, 400])
@pytest.mark.parametrize("channel", ["commentary json", "commentary <|constrain|>json"])
def test_harmony_may_name_the_tool_before_the_channel(channel: str, step: int) -> None:
    """As the template writes calls; the prompt contains the start of the first header."""
    call = f' to=functions.read<|channel|>{channel}<|message|>{{"path": "x"}}<|call|>'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for lead, thoughts in (("", ""), (thought, "hm")):
        raw = lead + call
        found = read("harmony", [raw[i : i + step] for i in range(0, len(raw), step)])
        assert found == (thoughts, "", [("read", {"path": "x"}, True)], False)
    assert read("harmony", list(" to be")) == ("", " to be", [], False)


@pytest.mark.parametrize("opening", ["[", '{"a":', "{a:"])
def test_deep_nesting_ends_in_no_call_and_in_no_error(opening: str) -> None:
    deep = opening * 20_000
    for family in SYNTAXES:
        for head in (
            "call:read{path:",
            "<|tool_call>call:read{path:",
            "<function=read(path=",
            '<tool_call>{"name": "read", "arguments": ',
            '{"name": "read", "parameters": ',
        ):
            calls = read(family, [head, deep])[2]
            assert not [call for call in calls if call[2]]
    raw = f"<function=read>\n<parameter=path>\n{deep}\n</parameter>\n</function>"
    listed = [Tool("read", {"properties": {"path": {"type": "array"}}})]
    assert read("qwen_xml", [raw], tools=listed)[2] == [("read", {"path": deep}, True)]


def test_what_was_written_of_a_text_is_given_however_it_was_cut() -> None:
    raw = '<tool_call>{"name": "read", "arguments": {"path": "a\\'
    assert read_lenient("hermes", [raw]) == read_lenient("hermes", list(raw))


def test_a_thought_that_is_opened_twice() -> None:
    for step in (1, 1000):
        for raw, thoughts in (
            ("<think>\nhm</think>ok", "hm"),
            ("\n <think>hm</think>ok", "hm"),
            ("hm <think> or so</think>ok", "hm <think> or so"),
        ):
            pieces = [raw[i : i + step] for i in range(0, len(raw), step)]
            assert read("hermes", pieces, thinking=True)[:2] == (thoughts, "ok")


def test_fences_and_lines_are_counted_however_text_is_cut() -> None:
    text = "a\n``" + "`json\n" + "x" * 200 + "\n"
    for step in (1, 2, 3, 1000):
        before = malformed_calls.ShownText()
        for i in range(0, len(text), step):
            before.add(text[i : i + step])
        assert not before.allows(malformed_calls.BARE_OPENS[0])
        before.add("``")
        before.add("`\n")
        assert before.allows(malformed_calls.BARE_OPENS[0])
        before.add("call")
        assert not before.allows(malformed_calls.CALL_PREFIX)
        assert not before.blank


LLAMA_FORMS = (
    '{"type": "function", "name": "read", "parameters": {"path": "x"}}',
    '{"type":"function","name":"read","parameters":{"path":"x"}}',
    '{"type": "function", "function": {"name": "read", "parameters": {"path": "x"}}}',
    '{"function": {"name": "read", "arguments": {"path": "x"}}}',
    '{"function": "read", "parameters": {"path": "x"}}',
    '{"type": "function", "id": "1", "name": "read", "parameters": {"path": "x"}}',
    '{"type": "function", "parameters": {"path": "x"}, "name": "read"}',
)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_calls_of_llama_may_begin_with_another_key(step: int) -> None:
    for form in LLAMA_FORMS:
        pieces = [form[i : i + step] for i in range(0, len(form), step)]
        assert read("llama", pieces) == ("", "", [("read", {"path": "x"}, True)], False), form
        assert SYNTAXES["llama"].call_state(form) is CallState.COMPLETE
        tagged = f"<tool_call>\n{form}\n</tool_call>"
        assert read("hermes", [tagged])[2] == [("read", {"path": "x"}, True)], form
    for form in LLAMA_FORMS[:5]:
        assert read("hermes", [form])[2] == [("read", {"path": "x"}, True)], form
    for text in (
        '{"type": "function", "text": "of x"}',
        '{"type": "function"}',
        '{"function": ["read"]}',
        '{"type": "object", "name": "read"}',
    ):
        for family in ("llama", "hermes"):
            assert read(family, list(text)) == ("", text, [], False)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_harmony_may_leave_functions_out_of_a_declared_name(step: int) -> None:
    header = "<|channel|>commentary to=read <|constrain|>json<|message|>"
    for raw in (
        header + '{"path": "x"}<|call|>',
        ' to=read<|channel|>commentary json<|message|>{"path": "x"}<|call|>',
    ):
        pieces = [raw[i : i + step] for i in range(0, len(raw), step)]
        assert read("harmony", pieces)[1:3] == ("", [("read", {"path": "x"}, True)])
        assert SYNTAXES["harmony"].call_state(raw) is CallState.COMPLETE
    other = header.replace("read", "python") + "1 + 1<|call|>"
    assert read("harmony", [other])[1:3] == ("1 + 1", [])
    assert SYNTAXES["harmony"].call_state(other) is CallState.NONE
    assert SYNTAXES["harmony"].call_state("Send it to=read it") is CallState.NONE


@pytest.mark.parametrize("family", ["gemma4", "hermes", "qwen_xml"])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_call_with_which_an_output_ends_inside_a_thought_counts(family: str, step: int) -> None:
    syntax = SYNTAXES[family]
    assert syntax.thought is not None
    call, stop = syntax.render("read", {"path": "x"}), syntax.render("stop", {})
    found = ("read", {"path": "x"}, True)
    close = syntax.thought.closing

    def thought(text: str) -> tuple:
        parser = OutputParser(syntax, TOOLS, thinking=True)
        return read_by(parser, [text[i : i + step] for i in range(0, len(text), step)])

    assert thought(f"Hm.\n{call}") == ("Hm.\n", "", [found], False)
    assert thought(f"Hm.\n{call}\n{close}\n\n") == ("Hm.\n", "", [found], False)
    assert thought(f"{call}\n{stop}\n") == ("", "", [found, ("stop", {}, True)], False)
    said = thought(f"Hm. {call} So.{close}Done.")
    assert said == (f"Hm. {call} So.", "Done.", [], False)
    said = thought(f"Hm. {call}{close}Done.")
    assert said == (f"Hm. {call}", "Done.", [], False)
    assert thought(f"Hm. {call}{close}{stop}")[1:3] == ("", [("stop", {}, True)])
    for text in (
        f"Hm. {call[:-14]}",
        f"Hm. {syntax.render('other', {'a': 1})}",
        f"The tag {syntax.opens[0]} begins a call, {call} is one.",
    ):
        assert thought(text) == (text, "", [], False)
