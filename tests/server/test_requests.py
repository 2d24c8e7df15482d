"""Decoding of bodies to requests: fields of other servers, past turns, and errors."""

import base64
import json
from typing import Any

import pytest

from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import RequestError
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat, decode_completion
from dflash_jax.server.errors import to_problem
from dflash_jax.server.prompt import resolve_max_tokens
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.responses import decode_responses
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.calls import ToolCallStart
from dflash_jax.tool_parsers.stream import OutputParser

HELLO = [{"role": "user", "content": "Hello"}]


def messages(**fields: Any) -> GenerationRequest:
    body = {"messages": HELLO, "max_tokens": 5} | fields
    return decode_messages(json.dumps(body).encode())


def chat(**fields: Any) -> GenerationRequest:
    return decode_chat(json.dumps({"messages": HELLO} | fields).encode())


def responses(**fields: Any) -> GenerationRequest:
    return decode_responses(json.dumps({"input": "Hello"} | fields).encode())


def test_threads_and_compaction_are_refused_so_that_clients_send_everything() -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(Problem) as caught:
            messages(thread=thread)
        error = caught.value.to_json()["error"]
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert (caught.value.status, caught.value.param) == (400, "thread")
    with pytest.raises(Problem, match="compaction is not supported"):
        messages(compaction={"type": "enabled"})
    assert messages(thread=None, compaction=None).max_tokens == 5


@pytest.mark.parametrize(("word", "counts"), [("max", "max"), ("ultra", "high"), ("none", "none")])
def test_every_effort_is_taken_and_unknown_ones_are_high(word: str, counts: str) -> None:
    asks = [
        chat(reasoning_effort=word),
        messages(output_config={"effort": word}),
        responses(reasoning={"effort": word}),
    ]
    for request in asks:
        assert request.template_kwargs == {
            "reasoning_effort": counts,
            "enable_thinking": counts != "none",
        }
        assert len(request.warnings) == (word != counts)


def test_p31_a_billing_line_is_in_no_prompt_and_other_system_text_is() -> None:
    def system(*texts: str) -> list[tuple[str, str]]:
        request = messages(system=[{"type": "text", "text": text} for text in texts])
        return [(m["role"], m["content"]) for m in request.messages or ()]

    first, second = (f"x-anthropic-billing-header: cc_version=2.1; cch={n};" for n in "ab")
    assert system(first, "Be brief.") == system(second, "Be brief.") == system("Be brief.")
    assert system(first, "Be brief.") != system(first, "Be long.")
    assert system(first + "\nBe brief.") == system("Be brief.")
    assert system(first) == [("user", "Hello")]
    whole = messages(system=f"{first}\nBe brief.").messages
    assert [(m["role"], m["content"]) for m in whole or ()] == system("Be brief.")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_names_that_other_servers_have_for_a_field_mean_that_field() -> None:
    assert chat(repeat_penalty=1.2).options == chat(rep_pen=1.2).options
    assert messages(rep_pen=1.2).options == {"repetition_penalty": 1.2}
    assert chat(repetition_penalty=1.1, repeat_penalty=1.2).options["repetition_penalty"] == 1.1
    assert chat(stop="A", stop_sequences=["B", ""]).stop == ("A", "B")
    assert chat(max_output_tokens=7).max_tokens == 7
    assert chat(max_tokens=6, max_output_tokens=7).max_tokens == 6
    assert chat(max_tokens=6, max_completion_tokens=8).max_tokens == 8
    text = json.dumps({"prompt": "a", "stop_sequences": ["B"], "max_output_tokens": 7})
    request = decode_completion(text.encode())
    assert (request.stop, request.max_tokens, request.warnings) == (("B",), 7, ())


def test_a_json_object_may_come_with_its_schema() -> None:
    for name in ("schema", "value"):
        form = {"type": "json_object", name: SCHEMA}
        assert chat(response_format=form).grammar == ("json", SCHEMA)
        with pytest.raises(Problem, match="no JSON schema") as caught:
            chat(response_format=form | {name: "a"})
        assert caught.value.param == f"response_format.{name}"
    assert chat(response_format={"type": "json_object"}).grammar == ("json", {"type": "object"})


THOUGHTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
    (
        {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
        {"reasoning_effort": "low", "enable_thinking": True},
    ),
    ({"reasoning": {}}, {"enable_thinking": True}),
    ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    (
        {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
        {"reasoning_effort": "none", "enable_thinking": True},
    ),
    (
        {
            "thinking": {"type": "enabled"},
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {"enable_thinking": False},
    ),
    ({"enable_thinking": False, "reasoning": {}}, {"enable_thinking": False}),
]


@pytest.mark.parametrize(("fields", "template"), THOUGHTS)
def test_chat_may_say_how_much_to_think_in_any_way(
    fields: dict[str, Any], template: dict[str, Any]
) -> None:
    request = chat(**fields)
    assert (request.template_kwargs, request.warnings) == (template, ())


def test_a_budget_of_thoughts_is_found_in_any_way() -> None:
    assert chat(thinking={"type": "enabled", "budget_tokens": 9}).thinking_budget == 9
    assert chat(reasoning={"max_tokens": 8}).thinking_budget == 8
    assert chat(thinking_token_budget=7).thinking_budget == 7
    with pytest.raises(Problem, match="exclude is not supported"):
        chat(reasoning={"exclude": True})


def test_thoughts_of_past_turns_are_kept_whatever_their_field_is_called() -> None:
    def of(request: GenerationRequest) -> list[Any]:
        return [
            m.get("reasoning_content") for m in request.messages or () if m["role"] == "assistant"
        ]

    again = {"role": "user", "content": "Go on."}
    for name in ("reasoning", "reasoning_content"):
        past = {"role": "assistant", "content": "Hi", "reasoning_content": None} | {name: "R"}
        talk = [*HELLO, past, again]
        assert of(chat(messages=talk)) == ["R"]
    both = {"role": "assistant", "content": "Hi", "reasoning": "S", "reasoning_content": "R"}
    assert of(chat(messages=[*HELLO, both, again])) == ["R"]

    first, second = ({"type": "thinking", "thinking": t, "signature": ""} for t in ("R", "S"))
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    blocks = [first, {"type": "text", "text": "Hi"}, second, call]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
    talk = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    assert of(messages(messages=talk)) == ["R\n\nS"]

    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": t}]}
        for t in ("R", "S")
    ]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": "Hi"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    assert of(responses(input=[*HELLO, *thoughts, call, output])) == ["R\n\nS"]
    between = [*HELLO, thoughts[0], said, thoughts[1], call, output]
    assert of(responses(input=between)) == ["R\n\nS"]


@pytest.mark.parametrize("name", list(SYNTAXES))
def test_tool_names_may_have_as_many_characters_as_anthropics(name: str) -> None:
    long, syntax = "n" * 128, SYNTAXES[name]
    request = messages(tools=[{"name": long, "input_schema": SCHEMA}])
    assert [tool.name for tool in request.declared_tools] == [long]
    assert syntax.beginnings(request.declared_tools, request.tool_choice) == ()
    parser = OutputParser(syntax, request.declared_tools)
    events = parser.push(syntax.render(long, {"a": 1})) + parser.finish()
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == [long]
    with pytest.raises(Problem, match="1 to 128 letters"):
        messages(tools=[{"name": long + "n"}])


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        chat,
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
    ),
    (lambda: decode_chat(b"{}"), {}, "messages"),
    (responses, {"input": []}, "input"),
    (responses, {"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    (responses, {"instructions": "a", "input": [{"role": "user"}]}, "input[0].content"),
    (responses, {"input": [*HELLO, {"type": "function_call"}]}, "input[1].name"),
    (
        responses,
        {"input": [*HELLO, {"type": "function_call_output", "output": [{"type": "image"}]}]},
        "input[1].output[0]",
    ),
    (
        responses,
        {"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]},
        "tools[1].name",
    ),
    (messages, {"tools": [{"name": "a b"}]}, "tools[0].name"),
    (messages, {"messages": []}, "messages"),
    (messages, {"messages": [], "system": "Be brief."}, "messages"),
    (chat, {"messages": []}, "messages"),
    (chat, {"recovery": "sometimes"}, "recovery"),
    (messages, {"tools": [{"name": "a"}, {"type": "bash_20250124", "name": "b"}]}, "tools[1].type"),
    (messages, {"system": [{"type": "image"}]}, "system[0]"),
    (messages, {"tool_choice": {"type": "some"}}, "tool_choice.type"),
    (
        messages,
        {"system": "a", "messages": [*HELLO, {"role": "user", "content": [{"type": "image"}]}]},
        "messages[1].content[0]",
    ),
    (
        messages,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
        "messages[0].content[0].name",
    ),
]


@pytest.mark.parametrize(("decode", "fields", "param"), WRONG)
def test_what_is_wrong_is_named_as_it_stands_in_the_request(
    decode: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(Problem) as caught:
        decode(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_the_engine_refuses_is_named_as_the_request_calls_it() -> None:
    def param(text: str, api: str = "chat") -> str | None:
        return to_problem(RequestError(text), api).param

    assert param("max_tokens is 0; expected an integer of at least 1") == "max_tokens"
    assert param("max_tokens is 0; expected more", "responses") == "max_output_tokens"
    assert param("logprobs is 21; expected less") == "top_logprobs"
    assert param("logprobs is 21; expected less", "completions") == "logprobs"
    assert param("block_size is 99; expected less") == "speculative.block_size"
    assert param("min_tokens and structured output do not go together") == "min_tokens"
    assert param("logit_bias names [9]; the target knows 0 to 8") == "logit_bias"
    assert param("the structure is not understood: why") is None


def test_whole_numbers_may_be_written_with_a_point() -> None:
    request = chat(max_tokens=8.0, n=2.0, top_k=5.0, seed=3.0, logprobs=True, top_logprobs=1.0)
    assert (request.max_tokens, request.n, request.logprobs) == (8, 2, 1)
    assert request.options == {"top_k": 5, "seed": 3}
    assert type(request.max_tokens) is type(request.options["seed"]) is int
    with pytest.raises(Problem, match="got `float`") as caught:
        chat(max_tokens=8.5)
    assert caught.value.param == "max_tokens"


def test_a_body_may_begin_with_the_mark_that_windows_puts_before_texts() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "é"}]}).encode()
    assert decode_chat(b"\xef\xbb\xbf" + body) == decode_chat(body)


HALF = {
    r"cut \ud83d here": "cut \ufffd here",
    r"\ude00": "\ufffd",
    r"\uD83D\uD83D\uDE00 \\ud83d": "\ufffd\U0001f600 \\ud83d",
    r"\\\ud83d\\": "\\\ufffd\\",
    "\ud83d": "\ufffd",
}


@pytest.mark.parametrize(("written", "read"), HALF.items())
def test_half_characters_are_replaced_with_a_warning(written: str, read: str) -> None:
    said = f'{{"role": "user", "content": "{written}"}}'.encode(errors="surrogatepass")
    used = f'{{"type": "tool_result", "content": "{written}"}}'.encode(errors="surrogatepass")
    requests = [
        decode_chat(b'{"messages": [%s]}' % said),
        decode_messages(b'{"max_tokens": 5, "messages": [%s]}' % said),
        decode_messages(
            b'{"max_tokens": 5, "messages": [{"role": "user", "content": [%s]}]}' % used
        ),
        decode_responses(b'{"input": [%s]}' % said),
    ]
    for request in requests:
        assert request.messages[-1]["content"] == read
        [warning] = request.warnings
        assert "U+FFFD" in warning
    whole = r'{"messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert decode_chat(whole.encode()).warnings == ()


def test_bytes_that_are_no_text_are_refused() -> None:
    for body in (b'{"messages": "\xff"}', b'{"messages": "\\ud83d', b"\\ud83d"):
        with pytest.raises(Problem, match="not valid JSON"):
            decode_chat(body)


def test_seeds_may_be_any_number_and_minus_one_is_none() -> None:
    assert chat(seed=-2).options == {"seed": 2**64 - 2}
    assert chat(seed=7 + 2**32).options == {"seed": 7 + 2**32}
    assert chat(seed=2**64).options == {"seed": 0}
    assert chat(seed=-1).options == {}


def test_older_messages_are_read() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    _, turn, first, second = chat(messages=talk).messages or ()
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (first["role"], first["content"], second["content"]) == ("tool", "1", "")


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_an_assistant_calls_tools(role: str) -> None:
    turn = {"role": role, "content": "x", "tool_calls": True}
    assert "tool_calls" not in (chat(messages=[*HELLO, turn]).messages or ())[-1]


def test_what_was_said_behind_a_call_is_of_the_same_turn() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"type": "message", "role": "assistant"}
    parts = [{"type": "output_text", "text": "B"}]
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    talk = [*HELLO, said | {"content": "A"}, call, said | {"content": parts}, output]
    request = responses(input=talk)
    assert [m["role"] for m in request.messages or ()] == ["user", "assistant", "tool"]
    assert request.messages[1]["content"] == "AB"  # type: ignore[index]


def test_recovery_takes_the_settings_for_loops() -> None:
    given = {"loops": False, "loop_tokens": 200, "repeated_calls": 0}
    wanted = Recovery(loops=False, loop_tokens=200, repeated_calls=0)
    assert chat(recovery=given).recovery == wanted
    unknown = "'runaway' is no setting of recovery; known are floor, tool_prefix"
    with pytest.raises(Problem, match=unknown):
        chat(recovery={"runaway": True})
    with pytest.raises(Problem, match=r"'runaway9' is no .*\. 9990 more are no setting"):
        chat(recovery={f"runaway{i}": 1 for i in range(10_000)})
    wrong = {"floor": -1, "loops": "maybe"}
    with pytest.raises(Problem, match=r"^recovery: floor is -1; .* 0\. loops is 'maybe'; expected"):
        chat(recovery=wrong)
    with pytest.raises(Problem, match="loop_tokens is 'many'; expected an integer of at least 2"):
        chat(recovery={"loop_tokens": "many"})


@pytest.mark.parametrize("read", [chat, messages, responses])
def test_recovery_may_be_a_word(read: Any) -> None:
    assert read(recovery="off").recovery == read(recovery=False).recovery == OFF
    assert read(recovery="on").recovery == read(recovery=True).recovery == Recovery()


@pytest.mark.parametrize(
    "kind",
    ["web_search_20250305", "web_fetch_20250910", "code_execution_20250522", "bash_20250124",
     "text_editor_20250728", "computer_20250124"],
)  # fmt: skip
def test_tools_that_anthropic_defines_are_refused_by_name(kind: str) -> None:
    """If they were ignored, the model would answer without the requested search."""
    own = {"type": "custom", "name": "read", "input_schema": SCHEMA}
    assert [tool.name for tool in messages(tools=[own]).declared_tools] == ["read"]
    with pytest.raises(Problem, match=f"'search' of type '{kind}'") as caught:
        messages(tools=[own, {"type": kind, "name": "search"}])
    assert (caught.value.status, caught.value.param) == (400, "tools[1].type")


def test_a_limit_of_minus_one_is_none() -> None:
    completion = decode_completion(json.dumps({"prompt": "a", "max_tokens": -1}).encode())
    asks = [
        completion,
        chat(max_tokens=-1),
        chat(max_completion_tokens=-1),
        chat(max_tokens=9, max_completion_tokens=-1),
        responses(max_output_tokens=-1),
        messages(max_tokens=-1),
    ]
    for request in asks:
        assert resolve_max_tokens([1] * 10, request, max_length=100, default=16) == 90
    assert asks[4].echoed_fields["max_output_tokens"] is None
    assert resolve_max_tokens([1] * 10, chat(), max_length=100, default=16) == 16
    with pytest.raises(Problem, match=r"prompt is too long: 100 tokens > 99 maximum;"):
        resolve_max_tokens([1] * 100, completion, max_length=100, default=16)


DOCUMENT = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Oak is hard."},
}


def test_documents_of_text_are_read_in_messages_and_in_results_of_tools() -> None:
    """In order, each after its title and context."""
    named = DOCUMENT | {"title": "Wood", "context": "Notes", "citations": {"enabled": True}}
    blocks = [{"type": "text", "text": "Is oak hard"}, {"type": "text", "text": "or soft?"}]
    listed = {"type": "document", "source": {"type": "content", "content": blocks}}
    request = messages(messages=[{"role": "user", "content": [named, *blocks, DOCUMENT, listed]}])
    [message] = request.messages or ()
    assert message["content"] == [
        "Wood\nNotes\nOak is hard.",
        "Is oak hard",
        "or soft?",
        "Oak is hard.",
        "Is oak hard\nor soft?",
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [DOCUMENT, blocks[0]]}
    request = messages(messages=[*HELLO, {"role": "user", "content": [result]}])
    assert (request.messages or ())[-1]["content"] == ["Oak is hard.", "Is oak hard"]


def test_files_that_are_text_are_read() -> None:
    coded = base64.b64encode("Eiche ist härter.".encode()).decode()
    urls = [f"data:text/plain;charset=utf-8;base64,{coded}", "data:text/csv,Eiche ist h%C3%A4rter."]
    for url in urls:
        file = {"filename": "wood.txt", "file_data": url}
        said = [{"role": "user", "content": [{"type": "file", "file": file}]}]
        assert chat(messages=said).messages == [
            {"role": "user", "content": "wood.txt\nEiche ist härter."}
        ]
        said = [{"role": "user", "content": [{"type": "input_file"} | file]}]
        assert (responses(input=said).messages or ())[0]["content"].startswith("wood.txt\nEiche")


PDF = "data:application/pdf;base64,JVBERi0="
NO_TEXTS: list[tuple[dict[str, Any], str]] = [
    (DOCUMENT | {"source": {"type": "base64", "data": "JVBERi0="}}, "source is of type 'base64'"),
    (DOCUMENT | {"source": {"type": "url", "url": "http://a"}}, "source is of type 'url'"),
    (DOCUMENT | {"source": {"type": "content", "content": [{"type": "image"}]}}, "than text"),
    (DOCUMENT | {"source": {"type": "content", "content": [DOCUMENT]}}, "than text"),
    (DOCUMENT | {"source": "text"}, "source is of type None"),
    (DOCUMENT | {"source": {"type": ["text"], "data": "a"}}, "source is of type"),
    ({"type": "file", "file": {"file_data": PDF}}, "part of type 'file'"),
    ({"type": "file", "file": {"file_id": "file-1"}}, "part of type 'file'"),
    ({"type": "file"}, "part of type 'file'"),
    ({"type": "input_file", "file_data": PDF}, "part of type 'input_file'"),
    ({"type": "input_file", "file_data": "data:text/plain;base64,%%%"}, "'input_file'"),
    ({"type": "input_file", "file_data": "data:text/plain;base64,/w=="}, "'input_file'"),
    ({"type": "image_url"}, "part of type 'image_url'"),
]


@pytest.mark.parametrize(("part", "says"), NO_TEXTS)
def test_parts_without_text_are_refused_by_name(part: dict[str, Any], says: str) -> None:
    said = [{"role": "user", "content": [part]}]
    for request, fields in ((chat, {"messages": said}), (messages, {"messages": said})):
        with pytest.raises(Problem, match=says) as caught:
            request(**fields)
        assert caught.value.status == 400
