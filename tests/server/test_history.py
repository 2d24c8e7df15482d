"""Past turns that a client cannot edit: they are rendered, named or left out, and never refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.loading import locate
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat
from dflash_jax.server.prompt import chat_prompt
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.responses import decode_responses
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.test_tokenizer import read

HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
STRICT = (  # calls need an object, and a system message comes first
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def core() -> Path:
    return locate("tiny", "target") / "tokenizer.json"


def chat(*messages: Any, **fields: Any) -> GenerationRequest:
    return decode_chat(json.dumps({"messages": [HELLO, *messages]} | fields).encode())


def responses(*items: Any, **fields: Any) -> GenerationRequest:
    return decode_responses(json.dumps({"input": [HELLO, *items]} | fields).encode())


def anthropic(*messages: Any, **fields: Any) -> GenerationRequest:
    body = {"messages": [HELLO, *messages], "max_tokens": 5} | fields
    return decode_messages(json.dumps(body).encode())


def shown(request: GenerationRequest, core: Path, template: str = STRICT) -> str:
    """Return the conversation after its first message, as a template renders it."""
    tokenizer: Tokenizer = read(core, {"chat_template": template})
    prompt = chat_prompt(request, tokenizer, ToolTurnCache(), SYNTAXES["hermes"].thought)
    return tokenizer.raw(prompt.ids).removeprefix("<user>Hello")


def turn(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **call}]}


RESULT = {"role": "tool", "tool_call_id": "c", "content": "done"}


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"x": ', 'raw={"x": '),
        ("[1]", "raw=[1]"),
        ('"s"', 'raw="s"'),
        ("5", "raw=5"),
        ('{"a": NaN}', 'raw={"a": NaN}'),
        ([1], "raw=[1]"),
        ("null", ""),
        (json.dumps('{"a": 1}'), "a=1"),  # encoded twice
        ('{"a": 1}', "a=1"),
        ({"a": 1}, "a=1"),
        ("", ""),
        (None, ""),
    ],
)
def test_arguments_that_are_no_object_are_rendered(core: Path, arguments: Any, seen: str) -> None:
    function = {"name": "f", "arguments": arguments}
    item = {"type": "function_call", "call_id": "c", **function}
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    older = {"role": "assistant", "content": None, "function_call": function}
    requests = [
        chat(turn(type="function", function=function), RESULT),
        chat(older, {"role": "function", "name": "f", "content": "done"}),
        responses(item, output),
    ]
    expected = f"<assistant>[f{' ' * bool(seen)}{seen}]<tool>done"
    warned = arguments == "null" or seen.startswith("raw")
    for request in requests:
        assert shown(request, core) == expected
        assert len(request.warnings) == warned
        assert all("no JSON object" in text for text in request.warnings)


def test_an_anthropic_input_that_is_no_object_is_rendered(core: Path) -> None:
    for given, seen in (("s", " raw=s"), ([1], " raw=[1]"), (None, ""), ({"a": 1}, " a=1")):
        used = {"type": "tool_use", "id": "c", "name": "f", "input": given}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "done"}
        request = anthropic(
            {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}
        )
        assert shown(request, core) == f"<assistant>[f{seen}]<tool>done"


# -- items of the Responses API ----------------------------------------------------------------

COMMAND = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
LOGS = [{"type": "logs", "logs": "4"}, {"type": "image", "url": "http://a"}]
FOUND = [{"file_id": "f1", "filename": "wood.txt", "score": 0.9, "text": "Oak is hard."}]
SHELL_OUTPUT = [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}}]
PATCH = {"type": "update_file", "path": "a.py", "diff": "+x"}
ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "+x"},
      {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}],
     "<assistant>[apply_patch input=+x]<tool>ok"),
    ([{"type": "custom_tool_call_output", "call_id": "c",
       "output": [{"type": "input_text", "text": "ok"}]}], "<tool>ok"),
    ([{"type": "local_shell_call", "id": "l", "call_id": "c", "action": COMMAND,
       "status": "completed"}, {"type": "local_shell_call_output", "id": "c", "output": "a.txt"}],
     "<assistant>[local_shell command=['ls']]<tool>a.txt"),
    ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c", "output": SHELL_OUTPUT}],
     "<assistant>[shell commands=['ls']]<tool>a\nb\nexit code 2"),
    ([{"type": "apply_patch_call", "call_id": "c", "operation": PATCH},
      {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no"}],
     "<assistant>[apply_patch type=update_file path=a.py diff=+x]<tool>The tool call failed.\nno"),
    ([{"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}},
      {"type": "computer_call_output", "call_id": "c",
       "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"}}],
     "<assistant>[computer type=click x=1]<tool>[computer_screenshot]"),
    ([{"type": "code_interpreter_call", "id": "c", "code": "2+2", "outputs": LOGS}],
     "<assistant>[code_interpreter code=2+2]<tool>4\n[image]"),
    ([{"type": "code_interpreter_call", "id": "c", "code": "2+2", "outputs": None}],
     "<assistant>[code_interpreter code=2+2]<tool>"),
    ([{"type": "file_search_call", "id": "c", "queries": ["oak"], "results": FOUND}],
     "<assistant>[file_search queries=['oak']]<tool>wood.txt\nOak is hard."),
    ([{"type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": '{"a": 1}',
       "output": "4"}, {"role": "assistant", "content": "It is 4."}],
     "<assistant>[f a=1]<tool>4<assistant>It is 4."),
    ([{"type": "mcp_call", "id": "c", "name": "f", "arguments": "{", "error": {"message": "no"}}],
     "<assistant>[f raw={]<tool>The tool call failed.\nno"),
    ([{"type": "function_call", "call_id": "c", "namespace": "crm", "name": "get",
       "arguments": "{}"}], "<assistant>[crm__get]"),
    ([{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}], '<tool>{"a": 1}'),
    ([{"type": None, "role": "user", "content": "Hi"}], "<user>Hi"),
    ([{"role": "tool", "tool_call_id": "c", "content": "done"}], "<tool>done"),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm. "}]},
      {"type": "web_search_call", "id": "w", "status": "completed"},
      {"role": "assistant", "content": [{"type": "output_text", "text": None},
                                        {"type": "refusal", "refusal": "No."}]}],
     "<assistant>Hm. No."),
]  # fmt: skip
LEFT_OUT: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "w", "status": "completed"},
    {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "x"}},
    {"type": "image_generation_call", "id": "i", "result": "aGk=", "status": "completed"},
    {"type": "file_search_call", "id": "f", "queries": ["x"], "results": None},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "mcp_list_tools", "server_label": "s", "tools": []},
    {"type": "mcp_approval_request", "id": "m", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    {"type": "ghost_snapshot", "ghost_commit": {}},
    {"type": "item_of_next_year"},
    {"type": ["message"]},
]


@pytest.mark.parametrize(("items", "seen"), ITEMS)
def test_items_of_every_kind_are_rendered(core: Path, items: Any, seen: str) -> None:
    assert shown(responses(*items), core) == seen
    assert shown(responses(*items, HELLO), core) == f"{seen}<user>Hello"


@pytest.mark.parametrize("item", LEFT_OUT)
def test_items_without_text_are_left_out_with_a_warning(core: Path, item: Any) -> None:
    request = responses(item, {"role": "user", "content": "Go on."})
    assert shown(request, core) == "<user>Go on."
    [warning] = request.warnings
    assert repr(item["type"]) in warning


# -- blocks of Anthropic -----------------------------------------------------------------------

USE = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "oak"}}
PAGE = {"type": "web_search_result", "url": "http://a", "title": "A", "encrypted_content": "x"}
FAILURE = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
FETCHED = {
    "type": "web_fetch_result",
    "url": "http://a",
    "content": {"type": "document", "title": "A", "source": {"type": "text", "data": "Oak."}},
}
TOOL = {"type": "tool_reference", "tool_name": "get_weather"}


def server_result(kind: str, content: Any) -> dict[str, Any]:
    return {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": content}


BLOCKS: list[tuple[list[dict[str, Any]], str]] = [
    ([USE, server_result("web_search", []), {"type": "text", "text": "hi"}],
     "[web_search query=oak]<tool><assistant>hi"),
    ([{"type": "text", "text": "Look:"}, USE, server_result("web_search", [PAGE])],
     "Look:[web_search query=oak]<tool>A\nhttp://a"),
    ([USE, server_result("web_search", FAILURE)],
     "[web_search query=oak]<tool>The tool call failed.\nunavailable"),
    ([USE | {"name": "web_fetch"}, server_result("web_fetch", FETCHED)],
     "[web_fetch query=oak]<tool>http://a\nA\nOak."),
    ([USE | {"name": "bash"}, server_result("bash_code_execution", {
        "type": "bash_code_execution_result", "stdout": "a", "stderr": "", "return_code": 1})],
     "[bash query=oak]<tool>a\nexit code 1"),
    ([USE | {"type": "mcp_tool_use"},
      server_result("mcp", [{"type": "text", "text": "no"}]) | {"is_error": True}],
     "[web_search query=oak]<tool>The tool call failed.\nno"),
    ([USE, server_result("tool_search", {
        "type": "tool_search_tool_search_result", "tool_references": [TOOL]})],
     "[web_search query=oak]<tool>get_weather"),
    ([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking",
      "data": "x"}, {"type": "text", "text": "Yes."}], "Hm.Yes."),
    ([{"type": "redacted_thinking", "data": "x"}], ""),
    ([], ""),
    ([{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "Yes."}], "Yes."),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "seen"), BLOCKS)
def test_blocks_of_every_kind_are_rendered(core: Path, blocks: Any, seen: str) -> None:
    request = anthropic({"role": "assistant", "content": blocks}, HELLO)
    assert shown(request, core) == f"<assistant>{seen}<user>Hello"


def test_encrypted_reasoning_is_left_out_with_a_warning() -> None:
    block = {"type": "redacted_thinking", "data": "x"}
    item = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    for request in (anthropic({"role": "assistant", "content": [block]}, HELLO), responses(item)):
        assert request.warnings == ("encrypted reasoning of past turns was left out",)


USER_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"type": "search_result", "source": "http://a", "title": "A",
      "content": [{"type": "text", "text": "Oak."}]}, "A\nhttp://a\nOak."),
    ({"type": "document", "source": {"type": "text", "data": "Oak."}, "title": "A"}, "A\nOak."),
    ({"type": "document", "source": {"type": "base64", "media_type": "text/plain",
                                     "data": "T2FrLg=="}}, "Oak."),
    ({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
     "tool addition: f"),
    (TOOL, "tool reference: get_weather"),
    ({"type": "text", "text": None}, ""),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "block_of_next_year", "text": "Oak."}, "Oak."),
    ({"type": "block_of_next_year"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("block", "seen"), USER_BLOCKS)
def test_what_is_text_is_read_in_every_place(core: Path, block: Any, seen: str) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "See:"}, block]}
    whole = "<user>See:" + (f"\n{seen}" if seen else "")
    for request in (anthropic(said), chat(said), responses(said)):
        assert shown(request, core) == whole
        unread = not seen or "next_year" in str(block)
        assert len(request.warnings) == unread
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    request = anthropic(
        {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}
    )
    assert shown(request, core) == f"<assistant>[f]<tool>{seen}"
    system = anthropic({"role": "system", "content": [block, {"type": "text", "text": "Brief."}]})
    assert shown(system, core).endswith("Brief.<user>Hello")


@pytest.mark.parametrize("kind", ["image", "audio", "input_image", "video_url", "image_file"])
def test_media_are_refused_by_name(kind: str) -> None:
    said = {"role": "user", "content": [{"type": kind, "source": {"type": "base64"}}]}
    for read_request in (anthropic, chat, responses):
        with pytest.raises(Problem, match=f"type '{kind}' is not supported") as caught:
            read_request(said)
        assert caught.value.code == "text_only"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"content": [{"type": "text", "text": "no"}]}, "The tool call failed.\nno"),
        ({"content": "no"}, "The tool call failed.\nno"),
        ({}, "The tool call failed."),
        ({"content": []}, "The tool call failed."),
        ({"content": "no", "is_error": False}, "no"),
    ],
)
def test_an_error_of_a_tool_reaches_the_prompt(core: Path, fields: Any, seen: str) -> None:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True} | fields
    request = anthropic(
        {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}
    )
    assert shown(request, core) == f"<assistant>[f]<tool>{seen}"


# -- chat completions --------------------------------------------------------------------------


def test_parts_of_a_turn_are_its_reasoning_and_its_text(core: Path) -> None:
    for thought in (
        {"type": "thinking", "thinking": "Hm."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
    ):
        parts = [thought, {"type": "text", "text": None}, {"type": "refusal", "refusal": "No."}]
        request = chat({"role": "assistant", "content": parts})
        assert shown(request, core) == "<assistant>Hm.No."
    assert shown(chat({"role": "assistant", "content": None, "refusal": "No."}), core).endswith(
        "No."
    )
    silent = anthropic({"role": "assistant", "content": None}, HELLO)
    assert shown(silent, core) == "<assistant><user>Hello"
    for empty in ({"content": ""}, {"content": []}, {"content": None}, {}):
        assert shown(chat({"role": "assistant"} | empty, HELLO), core) == "<assistant><user>Hello"


def test_past_calls_of_freeform_tools_are_calls_of_one_text(core: Path) -> None:
    call = turn(type="custom", custom={"name": "apply_patch", "input": "+x"})
    assert shown(chat(call, RESULT), core) == "<assistant>[apply_patch input=+x]<tool>done"


# -- templates that refuse what clients send ---------------------------------------------------

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
CALLS_FIRST = (  # as gpt-oss
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_a_conversation_that_a_template_refuses_is_repaired(core: Path) -> None:
    call = turn(type="function", function={"name": "f", "arguments": '{"a": 1}'})
    text = "Result of a tool call:\ndone"
    cases = [
        (ALTERNATING, [HELLO], "\n\nHello", "one role"),
        (CALLS_FIRST, [RESULT], f"<user>{text}", "unknown calls"),
        (CALLS_FIRST, [call, RESULT], "<assistant><tool>done", ""),
        (NO_TOOLS, [call, RESULT],
         f'<assistant>{{"name": "f", "arguments": {{"a": 1}}}}<user>{text}', "as text"),
    ]  # fmt: skip
    for template, messages, seen, noted in cases:
        request = chat(*messages)
        assert shown(request, core, template) == seen
        tokenizer = read(core, {"chat_template": template})
        prompt = chat_prompt(request, tokenizer, ToolTurnCache(), None)
        assert bool(prompt.warnings) == bool(noted)
        assert noted in " ".join(prompt.warnings)
    system = {"role": "system", "content": "Brief."}
    assert shown(chat(system), core, NO_TOOLS) == "\n\nBrief."
    seen = f'<assistant>{{"name": "f", "arguments": {{"a": 1}}}}<user>{text}'
    assert shown(chat(system, call, RESULT), core, NO_TOOLS) == f"<user>Brief.\n\nHello{seen}"
    with pytest.raises(Problem, match="never"):
        shown(chat(RESULT), core, "{{ raise_exception('never') }}")


@pytest.mark.parametrize(
    ("messages", "seen", "noted"),
    [
        ([HELLO], "<user><assistant>Hi!<user>Hello", "an empty message of the user"),
        ([HELLO, HELLO], "<user><assistant>Hi!<user>Hello\n\nHello", "shown as one"),
        ([{"role": "system", "content": "Brief."}, HELLO],
         "<user>Brief.<assistant>Hi!<user>Hello", "system messages are shown"),
        ([], "<user><assistant>Hi!", "an empty message of the user"),
    ],
)  # fmt: skip
def test_an_assistant_may_speak_first(core: Path, messages: Any, seen: str, noted: str) -> None:
    body = {"messages": [{"role": "assistant", "content": "Hi!"}, *messages]}
    request = decode_chat(json.dumps(body).encode())
    tokenizer = read(core, {"chat_template": ALTERNATING})
    prompt = chat_prompt(request, tokenizer, ToolTurnCache(), None)
    assert tokenizer.raw(prompt.ids) == seen
    assert noted in " ".join(prompt.warnings)


def efforts(*known: str, rest: str = "") -> str:
    """Return a template that takes these levels of reasoning only."""
    return (
        f"{{% set level = reasoning_effort | default({known[0]!r}) %}}"
        f"{{% if level not in {known} %}}{{{{ raise_exception('unknown effort ' ~ level) }}}}"
        f"{{% endif %}}{{{{ level }}}}{rest}"
    )


NO_WORDS = "{% if reasoning_effort is defined %}{{ raise_exception('no') }}{% endif %}-"
ALWAYS = "{% if enable_thinking is false %}{{ raise_exception('always') }}{% endif %}-"


@pytest.mark.parametrize(
    ("template", "asked", "level", "warned"),
    [
        (efforts("xhigh", "medium", "low"), "high", "xhigh", 1),
        (efforts("xhigh", "medium", "low"), "medium", "medium", 0),
        (efforts("xhigh", "medium", "low"), "none", "low", 1),
        (efforts("xhigh", "medium", "low"), "minimal", "low", 1),
        (efforts("xhigh", "medium", "low"), "ultra", "xhigh", 2),
        (efforts("medium", "low"), "max", "medium", 1),
        (efforts("deep", "quick"), "high", "deep", 1),
        (efforts("high", rest=ALTERNATING), "low", "high<user>Hello", 1),
        (NO_WORDS, "low", "-", 1),
        (ALWAYS, "none", "-", 1),
        (NO_WORDS + ALWAYS, "none", "--", 2),
    ],
)
def test_an_effort_is_the_nearest_that_the_template_takes(
    core: Path, template: str, asked: str, level: str, warned: int
) -> None:
    tokenizer = read(core, {"chat_template": template})
    output = {"output_config": {"effort": asked}}
    for request in (
        chat(reasoning_effort=asked),
        responses(reasoning={"effort": asked}),
        anthropic(**output),
    ):
        prompt = chat_prompt(request, tokenizer, ToolTurnCache(), None)
        assert tokenizer.raw(prompt.ids) == level
        assert len((*prompt.warnings, *request.warnings)) == warned


def test_an_effort_of_template_variables_is_taken_and_messages_are_repaired_too(core: Path) -> None:
    template = efforts("low", "medium", rest=ALTERNATING)
    tokenizer = read(core, {"chat_template": template})
    for effort, level in (("medium", "medium"), ("deep", "medium"), (5, "medium"), ("none", "low")):
        request = chat(HELLO, chat_template_kwargs={"reasoning_effort": effort})
        prompt = chat_prompt(request, tokenizer, ToolTurnCache(), None)
        assert tokenizer.raw(prompt.ids) == f"{level}<user>Hello\n\nHello"
        assert len(prompt.warnings) == 1 + (effort != "medium")


def test_the_fewest_changes_are_made_for_a_template(core: Path) -> None:
    call = turn(type="function", function={"name": "f", "arguments": "{}"})
    system = {"role": "system", "content": "Brief."}
    assert shown(chat(call, RESULT, HELLO, HELLO, system), core, STRICT) == (
        "<system>Brief.<user>Hello<assistant>[f]<tool>done<user>Hello<user>Hello"
    )
    no_system = (
        "{% for m in messages if m.role == 'system' %}{{ raise_exception('no') }}{% endfor %}"
    )
    assert shown(chat(system, call, RESULT), core, no_system + STRICT) == (
        "\n\nBrief.<assistant>[f]<tool>done"
    )
