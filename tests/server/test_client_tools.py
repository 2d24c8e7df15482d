"""Tools that are no plain functions: freeform ones, namespaces and the local shell."""

import json
from typing import Any

import pytest

from dflash_jax.server.completions import ChatWriter, decode_chat
from dflash_jax.server.freeform import FreeformInput, freeform_input
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.responses import ResponsesWriter, decode_responses
from dflash_jax.tokenizer import Tokenizer
from tests.server.test_replies import generation, replied, streamed

GRAMMAR = {"syntax": "lark", "definition": "start: /.+/s"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch files."}
SHELL = {"type": "local_shell"}
GET = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {}}}
CRM = {"type": "namespace", "name": "crm", "tools": [GET, {"type": "custom", "name": "sql"}]}
MCP = {"type": "namespace", "name": "mcp__git__", "tools": [GET]}
SEARCH = {"type": "web_search"}
TEXT = '*** Begin "Patch"\n+é \U0001f600 \\n\t*** End'


def responses(*tools: Any, **fields: Any) -> GenerationRequest:
    return decode_responses(json.dumps({"input": "Hi", "tools": tools} | fields).encode())


def chat(*tools: Any, **fields: Any) -> GenerationRequest:
    talk = [{"role": "user", "content": "Hi"}]
    return decode_chat(json.dumps({"messages": talk, "tools": tools} | fields).encode())


def call(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def output(
    tokenizer: Tokenizer, request: GenerationRequest, text: str, end: str = "stop"
) -> tuple[list[dict], list[dict]]:
    """Return the items of a whole response, and the events of a streamed one."""
    reply, events = replied(tokenizer, text, request, end=end)
    whole = ResponsesWriter(generation(reply, request)).to_json()["output"]
    chunks = streamed(ResponsesWriter(generation(reply, request)), reply, events)
    final = chunks[-1]["response"]["output"]
    assert [without_ids(item) for item in final] == [without_ids(item) for item in whole]
    return whole, chunks


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "id"}


@pytest.mark.parametrize("form", [None, {"type": "text"}, {"type": "grammar", **GRAMMAR}])
def test_a_freeform_tool_is_called_with_text(tokenizer: Tokenizer, form: Any) -> None:
    request = responses(PATCH | ({"format": form} if form else {}), SEARCH)
    assert [tool.name for tool in request.declared_tools] == ["apply_patch"]
    [function] = [tool["function"] for tool in request.tools]
    assert function["description"] == "Patch files."
    held = "grammar" in json.dumps(form)
    assert (GRAMMAR["definition"] in json.dumps(function)) == held
    assert len(request.warnings) == 1 + held
    [item], chunks = output(tokenizer, request, call("apply_patch", {"input": TEXT}))
    assert item["id"].startswith("ctc_")
    assert without_ids(item) == {
        "type": "custom_tool_call", "call_id": item["call_id"], "name": "apply_patch",
        "input": TEXT, "status": "completed",
    }  # fmt: skip
    kinds = [chunk["type"] for chunk in chunks]
    deltas = [c["delta"] for c in chunks if c["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == TEXT
    [done] = [c for c in chunks if c["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == TEXT
    assert not any("function_call" in kind for kind in kinds)
    [added] = [c["item"] for c in chunks if c["type"] == "response.output_item.added"]
    assert (added["type"], added["input"], added["status"]) == (item["type"], "", "in_progress")
    assert {c.get("item_id", added["id"]) for c in chunks} == {added["id"]}
    assert request.echoed_fields["tools"] == [PATCH | ({"format": form} if form else {})]


def test_other_arguments_of_a_freeform_tool_are_its_text(tokenizer: Tokenizer) -> None:
    for arguments, text in (({"patch": "+x"}, '{"patch": "+x"}'), ({}, "")):
        [item], chunks = output(tokenizer, responses(PATCH), call("apply_patch", arguments))
        assert item["input"] == text
        deltas = [c["delta"] for c in chunks if "input.delta" in c["type"]]
        assert "".join(deltas) == text


def test_a_freeform_call_that_a_limit_cut_is_incomplete(tokenizer: Tokenizer) -> None:
    begun = call("apply_patch", {"input": TEXT})[: -len('End"}}\n</tool_call>')]
    request = responses(PATCH)
    reply, events = replied(tokenizer, begun, request, end="length")
    [*_, last] = streamed(ResponsesWriter(generation(reply, request)), reply, events)
    [item] = last["response"]["output"]
    assert item["status"] == "incomplete"
    assert TEXT.startswith(item["input"])
    assert item["input"]


def test_a_local_shell_is_called_with_its_action(tokenizer: Tokenizer) -> None:
    arguments = {"command": ["ls", "-l"], "working_directory": "/tmp"}
    [item], chunks = output(tokenizer, responses(SHELL), call("local_shell", arguments))
    action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None}
    action |= {"user": None, "working_directory": "/tmp"}
    assert (item["type"], item["action"]) == ("local_shell_call", action)
    assert not any("delta" in chunk for chunk in chunks)
    [item], _ = output(tokenizer, responses(SHELL), call("local_shell", {"command": "ls | wc"}))
    assert item["action"]["command"] == ["bash", "-lc", "ls | wc"]


def test_shells_and_patches_are_called_in_their_forms(tokenizer: Tokenizer) -> None:
    patch = {"type": "update_file", "path": "a.py", "diff": "+x"}
    text = call("shell", {"commands": ["ls"]}) + call("apply_patch", patch)
    request = responses({"type": "shell"}, {"type": "apply_patch"})
    [shell, patched], _ = output(tokenizer, request, text)
    action = {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}
    assert (shell["type"], shell["action"]) == ("shell_call", action)
    assert (patched["type"], patched["operation"]) == ("apply_patch_call", patch)
    again = responses(input=[{"role": "user", "content": "Hi"}, shell, patched])
    calls = (again.messages or ())[-1]["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [{"commands": ["ls"]}, patch]
    hosted = responses({"type": "shell", "environment": {"type": "container_auto"}})
    assert (hosted.declared_tools, len(hosted.warnings)) == ((), 1)


def test_items_and_events_are_what_the_client_declares(tokenizer: Tokenizer) -> None:
    types = pytest.importorskip("openai.types.responses", reason="openai is not installed")
    import pydantic

    inner = GET | {"strict": False}
    tools = [PATCH, SHELL, {"type": "shell"}, {"type": "apply_patch"}, CRM | {"tools": [inner]}]
    request = responses(PATCH | {"name": "p"}, *tools[1:])
    calls = [
        call("p", {"input": "+x"}), call("local_shell", {"command": ["ls"]}), call("crm__get", {}),
        call("shell", {"commands": ["ls"]}), call("apply_patch", {"type": "delete_file"}),
    ]  # fmt: skip
    items, chunks = output(tokenizer, request, "".join(calls))
    assert len(items) == 5
    declared = pydantic.TypeAdapter(types.ResponseStreamEvent)
    for chunk in chunks:
        declared.validate_python(chunk)
    names = [tool.name for tool in responses(PATCH, {"type": "apply_patch"}).declared_tools]
    assert names == ["apply_patch"]


def test_tools_of_a_namespace_are_answered_with_it(tokenizer: Tokenizer) -> None:
    request = responses(CRM, MCP, GET)
    names = ["crm__get", "crm__sql", "mcp__git__get", "get"]
    assert [tool.name for tool in request.declared_tools] == names
    text = call("crm__get", {"a": 1}) + call("crm__sql", {"input": "x"}) + call("get", {})
    [first, second, third], _ = output(tokenizer, request, text)
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "crm", "get")
    assert (second["type"], second["namespace"], second["name"]) == (
        "custom_tool_call", "crm", "sql",
    )  # fmt: skip
    assert (third["name"], "namespace" in third) == ("get", False)
    # The next request sends the calls back.
    again = responses(CRM, input=[{"role": "user", "content": "Hi"}, first, second])
    calls = (again.messages or ())[-1]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == names[:2]
    assert calls[1]["function"]["arguments"] == {"input": "x"}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "get"}, "get"),
        ({"type": "function", "name": "get", "namespace": "crm"}, "crm__get"),
        ({"type": "local_shell"}, "local_shell"),
    ],
)
def test_a_tool_of_every_kind_may_be_demanded(choice: Any, name: str) -> None:
    tools = [SEARCH, PATCH, GET, CRM, SHELL]
    assert responses(*tools, tool_choice=choice).tool_choice.name == name
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice, SEARCH]}
    request = responses(*tools, tool_choice=allowed)
    assert [tool.name for tool in request.declared_tools] == [name]
    assert request.tool_choice.kind == "required"


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"type": "web_search"}, "'web_search', which does not run here"),
        ({"type": "mcp", "server_label": "s"}, "'mcp', which does not run here"),
        ({"type": "local_shell"}, "'local_shell', which does not run here"),
        ({"type": "custom", "name": "other"}, "names the tool 'other'"),
        ({"type": "function", "name": "get", "namespace": "crm"}, "names the tool 'crm__get'"),
        ({"type": "allowed_tools", "tools": [SEARCH]}, "allows no declared tool"),
    ],
)
def test_a_choice_of_a_tool_that_does_not_run_here_is_refused_by_name(
    choice: Any, says: str
) -> None:
    with pytest.raises(Problem, match=says) as caught:
        responses(GET, SEARCH, tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[1]"),
        ({"type": "custom", "name": "a b"}, "tools[1].name"),
        ({"type": "namespace", "name": "a"}, "tools[1]"),
        ({"type": "namespace", "name": "a", "tools": [GET, {"type": "function"}]},
         "tools[1].tools[1]"),
    ],
)  # fmt: skip
def test_a_tool_without_a_name_is_named_by_its_place(tool: Any, param: str) -> None:
    with pytest.raises(Problem) as caught:
        responses(GET, tool)
    assert caught.value.param == param


def test_chat_completions_answer_freeform_tools_in_their_form(tokenizer: Tokenizer) -> None:
    custom = {"name": "apply_patch", "format": {"type": "grammar", "grammar": GRAMMAR}}
    tools = [{"type": "custom", "custom": custom}, {"type": "function", "function": {"name": "f"}}]
    chosen = {"type": "custom", "custom": {"name": "apply_patch"}}
    request = chat(*tools, tool_choice=chosen)
    assert request.tool_choice.name == "apply_patch"
    assert GRAMMAR["definition"] in json.dumps(request.tools)
    assert len(request.warnings) == 1
    allowed = {"mode": "auto", "tools": [chosen]}
    fields = {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    assert [t.name for t in chat(*tools, **fields).declared_tools] == ["apply_patch"]
    text = call("apply_patch", {"input": TEXT}) + call("f", {"a": 1})
    request = chat(*tools)  # a named tool would end the output with its first call
    reply, events = replied(tokenizer, text, request)
    [choice] = ChatWriter(generation(reply, request)).to_json()["choices"]
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["custom"]) == ("custom", {"name": "apply_patch", "input": TEXT})
    assert json.loads(second["function"]["arguments"]) == {"a": 1}
    chunks = streamed(ChatWriter(generation(reply, request)), reply, events)
    deltas = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    parts = [delta["custom"] for delta in deltas if "custom" in delta]
    assert parts[0] == {"name": "apply_patch", "input": ""}
    assert len(parts) > 3
    assert "".join(part["input"] for part in parts) == TEXT
    assert [delta["type"] for delta in deltas if "id" in delta] == ["custom", "function"]


@pytest.mark.parametrize("width", [1, 2, 3, 7])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_text_of_a_call_is_decoded_while_it_arrives(width: int, ascii_only: bool) -> None:
    arguments = json.dumps({"input": TEXT, "more": 1}, ensure_ascii=ascii_only)
    decoder, parts = FreeformInput(), []
    for at in range(0, len(arguments), width):
        parts.append(decoder.push(arguments[at : at + width]))
        assert TEXT.startswith(decoder.text)
    assert "".join(parts) == TEXT == freeform_input(arguments)
    assert decoder.finish(arguments) == ""
    lone = '{"input": "a\\ud83d"}'
    assert FreeformInput().push(lone) == freeform_input(lone) == "a\ufffd"
