"""Responses of the four APIs to the same output: reasoning, calls, ends. Without an engine."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.engine.result import Piece, Result, Stats, TokenLogprob
from dflash_jax.engine.state_machine import OFF
from dflash_jax.loading import locate
from dflash_jax.server.anthropic import MessagesRequest, MessagesWriter, decode_messages
from dflash_jax.server.completions import (
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    CompletionWriter,
    decode_chat,
    decode_completion,
)
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import UNSUPPORTED
from dflash_jax.server.generation import Generation
from dflash_jax.server.prompt import EncodedPrompt, ToolTurnCache, chat_prompt
from dflash_jax.server.protocol import GenerationRequest, Problem, new_id
from dflash_jax.server.reply import Reply, ToolCall
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.responses import ResponsesRequest, ResponsesWriter, decode_responses
from dflash_jax.server.served_models import ServerConfig
from dflash_jax.server.tools import parse_tools
from dflash_jax.server.writer import chat_logprobs, completion_logprobs, encode, reused
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, syntax_of
from dflash_jax.tool_parsers.calls import joined

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
TURN = f"<think>\nLook first.\n</think>\n\nLet me look:\n{CALL}<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_directory(locate("tiny", "target"))
    assert found is not None
    return found


def asked(api: str = "chat", **changes: Any) -> GenerationRequest:
    tools, declared, choice = parse_tools(TOOLS, None)
    messages = parse_messages([{"role": "user", "content": "Read a.txt"}])
    base = GenerationRequest(
        api=api,
        model=None,
        messages=messages,
        tools=tools,
        declared_tools=declared,
        tool_choice=choice,
    )
    return dataclasses.replace(base, **changes)


def pieces(
    tokenizer: Tokenizer, ids: list[int], width: int, *, logprobs: bool = False
) -> list[Piece]:
    """Return the pieces of an engine that emits `width` tokens at a time."""
    text = Detokenizer(tokenizer)
    made = []
    for i in range(0, len(ids), width):
        part = ids[i : i + width]
        found = tuple(TokenLogprob(token, -1.0, ()) for token in part) if logprobs else ()
        made.append(Piece(tuple(part), text.push(part), found))
    rest = text.finish()
    return [*made, Piece((), rest)] if rest else made


def replied(
    tokenizer: Tokenizer,
    text: str,
    request: GenerationRequest,
    *,
    end: str = "stop",
    width: int = 3,
) -> tuple[Reply, list[list]]:
    """Return the reply to a request for an output with this raw text, and its events by piece."""
    ids = tokenizer.encode(text, specials=False)
    reply = Reply(0, request, tokenizer, SYNTAXES["hermes"])
    events = [reply.push(piece) for piece in pieces(tokenizer, ids, width)]
    stats = Stats(prompt_tokens=5, output_tokens=len(ids))
    events.append(reply.finish(Result(ids, text, end, stats)))
    return reply, events


def generation(reply: Reply, request: GenerationRequest) -> Generation:
    model = SimpleNamespace(name="tiny", defaults=ServerConfig(), fingerprint="fp_0")
    model.engine = SimpleNamespace(tokenizer=None)
    prompts = [EncodedPrompt([1] * 5)]
    made = SimpleNamespace(model=model, request=request, replies=[reply], prompts=prompts, cached=0)
    return cast(Generation, made)


def streamed(writer: Any, reply: Reply, events: list[list]) -> list[dict]:
    result, reply.result = reply.result, None
    raw = writer.start()
    for i, new in enumerate(events):
        if i == len(events) - 1:
            reply.result = result
        raw += writer.events(reply, new)
    raw += writer.close()
    lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_splits_thought_content_and_call(tokenizer: Tokenizer) -> None:
    request = asked()
    reply, events = replied(tokenizer, TURN, request)
    [choice] = ChatWriter(generation(reply, request)).to_json()["choices"]
    message = choice["message"]
    assert message["reasoning_content"].strip() == "Look first."
    assert message["reasoning"] == message["reasoning_content"]
    assert [d["text"] for d in message["reasoning_details"]] == [message["reasoning"]]
    assert message["content"] == "Let me look:"
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "read_file"
    assert json.loads(call["function"]["arguments"]) == {"path": "a.txt"}
    assert choice["finish_reason"] == "tool_calls"
    details = choice["finish_details"]
    assert 0 < details["thinking_tokens"] < details["total_tokens"]

    chunks = streamed(ChatWriter(generation(reply, request)), reply, events)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("content") or "" for d in deltas) == "Let me look:"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message["reasoning_content"]
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert calls[0]["id"] == call["id"]
    arguments = "".join(c["function"].get("arguments", "") for c in calls)
    assert arguments == call["function"]["arguments"]
    assert len(calls) > 3
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "tool_calls"
    assert all("<" not in json.dumps(d) for d in deltas)


def test_anthropic_has_a_block_for_each(tokenizer: Tokenizer) -> None:
    request = asked("messages")
    reply, events = replied(tokenizer, TURN, request)
    whole = MessagesWriter(generation(reply, request)).to_json()
    assert [b["type"] for b in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"path": "a.txt"}
    assert whole["stop_reason"] == "tool_use"

    chunks = streamed(MessagesWriter(generation(reply, request)), reply, events)
    starts = [c for c in chunks if c["type"] == "content_block_start"]
    stops = [c["index"] for c in chunks if c["type"] == "content_block_stop"]
    assert [c["content_block"]["type"] for c in starts] == ["thinking", "text", "tool_use"]
    assert stops == [0, 1, 2]
    signed = [c for c in chunks if c.get("delta", {}).get("type") == "signature_delta"]
    [said] = {c["delta"]["signature"] for c in signed} | {whole["content"][0]["signature"]}
    assert said
    assert [c["index"] for c in signed] == [0]
    parts = [
        c["delta"].get("partial_json", "") for c in chunks if c["type"] == "content_block_delta"
    ]
    assert json.loads("".join(parts)) == {"path": "a.txt"}
    assert chunks[-2]["delta"]["stop_reason"] == "tool_use"


def test_responses_have_an_item_for_each(tokenizer: Tokenizer) -> None:
    request = asked("responses")
    reply, events = replied(tokenizer, TURN, request)
    whole = ResponsesWriter(generation(reply, request)).to_json()
    kinds = ["reasoning", "message", "function_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["status"] == "completed"

    chunks = streamed(ResponsesWriter(generation(reply, request)), reply, events)
    assert [c["sequence_number"] for c in chunks] == list(range(len(chunks)))
    done = [c["item"] for c in chunks if c["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == kinds
    assert json.loads(done[2]["arguments"]) == {"path": "a.txt"}
    assert done[2]["call_id"] == whole["output"][2]["call_id"]
    assert chunks[-1]["response"]["output"] == done
    for item in done[:2]:  # OpenAI's stream helpers need content parts
        kind = item["content"][0]["type"]
        own = [c for c in chunks if c.get("item_id") == item["id"]]
        kinds = [c["type"].removeprefix("response.") for c in own if "delta" not in c]
        assert kinds == ["content_part.added", f"{kind}.done", "content_part.done"]
        assert own[0]["part"]["type"] == kind
        assert own[0]["part"]["text"] == ""
        assert own[-1]["part"] == item["content"][0]


def test_a_call_that_was_cut_off_is_length_and_no_call(tokenizer: Tokenizer) -> None:
    request = asked()
    reply, _ = replied(tokenizer, "Let me look:\n" + CALL[:50], request, end="length")
    [choice] = ChatWriter(generation(reply, request)).to_json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "Let me look:"


OTHER = CALL.replace("read_file", "other")


def whole_and_streamed(
    tokenizer: Tokenizer, api: str, writer: Any, text: str, end: str = "stop"
) -> tuple[dict, list[dict], Reply]:
    """Return the response to a text as one object and as a stream, and the reply."""
    request = asked(api)
    reply, events = replied(tokenizer, text, request, end=end)
    whole = writer(generation(reply, request)).to_json()
    live = dataclasses.replace(request, stream=True)
    return whole, streamed(writer(generation(reply, live)), reply, events), reply


APIS = [("chat", ChatWriter), ("messages", MessagesWriter), ("responses", ResponsesWriter)]


def warned(api: str, whole: dict, chunks: list[dict]) -> list[str]:
    """Return the warnings of a response, which equal those of its stream."""
    last = {"chat": -1, "messages": -2, "responses": -1}[api]
    end = chunks[last]["response"] if api == "responses" else chunks[last]
    assert end.get("warnings", []) == whole.get("warnings", [])
    return whole.get("warnings", [])


@pytest.mark.parametrize(("api", "writer"), APIS)
def test_T22_a_call_of_an_undeclared_tool_is_given_to_the_caller_and_named(
    tokenizer: Tokenizer, api: str, writer: Any
) -> None:
    """If such a call was dropped, a response of 50 tokens would be empty."""
    whole, chunks, reply = whole_and_streamed(tokenizer, api, writer, f"{OTHER}<|im_end|>")
    assert reply.finish_reason == "tool_calls"
    assert reply.details["undeclared_tools"] == ["other"]
    [warning] = warned(api, whole, chunks)
    assert "called the tool 'other', which the request does not declare" in warning
    if api == "chat":
        [choice] = whole["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (call["function"]["name"], choice["finish_reason"]) == ("other", "tool_calls")
        assert choice["finish_details"]["undeclared_tools"] == ["other"]
        deltas = [c["choices"][0]["delta"].get("tool_calls", [{}])[0] for c in chunks]
        names = [d["function"]["name"] for d in deltas if d.get("id")]
    elif api == "messages":
        [block] = whole["content"]
        assert (block["name"], block["input"]) == ("other", {"path": "a.txt"})
        assert (whole["stop_reason"], chunks[-2]["delta"]["stop_reason"]) == ("tool_use",) * 2
        names = [c["content_block"]["name"] for c in chunks if "content_block" in c]
    else:
        [item] = whole["output"]
        assert (item["type"], item["name"]) == ("function_call", "other")
        names = [item["name"] for item in chunks[-1]["response"]["output"]]
    assert names == ["other"]


BROKEN = [
    pytest.param('<tool_call>\n{"name": bad}\n</tool_call>', id="no-name"),
    pytest.param('<tool_call>\n{"name": "read_file", "arguments": {"path": "a', id="unfinished"),
    pytest.param("<tool_call>\n", id="begun"),
    pytest.param('<tool_call>\n{"name": "other", "arguments": {"path"', id="undeclared-unfinished"),
    pytest.param('<tool_call>\n{"name": "two words"}\n</tool_call>', id="no-name-of-a-tool"),
    pytest.param("</tool_call>", id="closed-only"),
]


@pytest.mark.parametrize("raw", BROKEN)
@pytest.mark.parametrize(("api", "writer"), APIS)
def test_no_answer_with_tokens_is_empty(
    tokenizer: Tokenizer, api: str, writer: Any, raw: str
) -> None:
    whole, chunks, reply = whole_and_streamed(tokenizer, api, writer, f"{raw}<|im_end|>")
    assert reply.content.strip() == raw.strip()
    assert reply.finish_reason == "stop"
    if raw.startswith("<tool_call>"):
        assert reply.details["unreadable_calls"] == 1
        assert any("could not be read" in warning for warning in warned(api, whole, chunks))
    if api == "chat":
        text = whole["choices"][0]["message"]["content"]
        sent = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    elif api == "messages":
        text = whole["content"][0]["text"]
        sent = "".join(c["delta"].get("text", "") for c in chunks if "delta" in c)
    else:
        text = whole["output"][0]["content"][0]["text"]
        kinds = "response.output_text.delta"
        sent = "".join(c["delta"] for c in chunks if c["type"] == kinds)
    assert text == sent == reply.content


def test_a_call_that_a_limit_cut_is_named_where_it_is_left_out(tokenizer: Tokenizer) -> None:
    for text in (CALL[:50], OTHER[:40]):
        whole, chunks, reply = whole_and_streamed(tokenizer, "chat", ChatWriter, text, "length")
        assert reply.details["unfinished_call"] is True
        [warning] = warned("chat", whole, chunks)
        assert "cut inside a tool call" in warning
        assert whole["choices"][0]["message"]["content"] == ""


def test_a_whole_call_before_a_broken_one_is_there_to_be_answered(tokenizer: Tokenizer) -> None:
    text = f"{CALL}\n{CALL[:40]}<|im_end|>"
    whole, _, reply = whole_and_streamed(tokenizer, "chat", ChatWriter, text)
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert reply.content == CALL[:40]


def test_one_call_is_enough_where_parallel_calls_are_off(tokenizer: Tokenizer) -> None:
    both = f"{CALL}\n{CALL}<|im_end|>"
    assert len(replied(tokenizer, both, asked())[0].done_calls) == 2
    reply, _ = replied(tokenizer, both, asked(parallel_tool_calls=False), end="cancelled")
    assert len(reply.calls) == 1
    assert reply.satisfied
    assert reply.finish_reason == "tool_calls"


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_plain_text_ends_as_the_engine_says(tokenizer: Tokenizer, end: str) -> None:
    reply, _ = replied(tokenizer, "Yes, it is.\n", asked(), end=end)
    assert reply.finish_reason == end
    assert reply.content == "Yes, it is.\n"


@pytest.mark.parametrize("width", [1, 1000])
def test_a_stop_string_in_a_call_does_not_end_the_answer(tokenizer: Tokenizer, width: int) -> None:
    request = asked(stop=("a.txt", "path", "{"))
    reply, events = replied(tokenizer, TURN, request, width=width)
    assert not reply.satisfied
    assert (reply.finish_reason, reply.content) == ("tool_calls", "Let me look:")
    assert [call.arguments for call in reply.done_calls] == ['{"path": "a.txt"}']
    chunks = streamed(ChatWriter(generation(reply, request)), reply, events)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    reply, _ = replied(tokenizer, TURN, asked(stop=("me",)), width=width)
    assert (reply.content, reply.calls, reply.finish_reason) == ("Let ", [], "stop")


def test_R19_a_whole_answer_leaves_out_what_a_loop_repeated(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("<think>\nhm\n</think>\n\nSo", specials=False)]
    loop = tokenizer.encode(" a", specials=False)
    said = {}
    for stream in (False, True):
        reply = Reply(0, asked(stream=stream), tokenizer, SYNTAXES["hermes"])
        out = [*ids, *loop * 12]
        events = reply.push(Piece(tuple(out), ""))
        stats = Stats(prompt_tokens=5, output_tokens=len(out))
        stats.recovery.update(runaway=1, runaway_dropped_tokens=9 * len(loop))
        events += reply.finish(Result(out, "", "length", stats))
        assert reply.ids == out
        assert reply.finish_reason == "length"
        assert reply.details["total_tokens"] == len(out)
        assert reply.details["thinking_tokens"] > 2
        assert reply.reasoning.strip() == "hm"
        said[stream] = reply.content
    assert said == {False: "So a a a", True: "So" + " a" * 12}


def test_a_whole_answer_keeps_the_first_of_equal_calls(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode(TURN.removesuffix("<|im_end|>"), specials=False)
    more = tokenizer.encode(f"\n{CALL}\n{CALL}", specials=False)
    calls = {}
    for stream in (False, True):
        reply = Reply(0, asked(stream=stream), tokenizer, SYNTAXES["hermes"])
        reply.push(Piece((*first, *more), ""))
        stats = Stats(prompt_tokens=5, output_tokens=len(first) + len(more))
        stats.recovery.update(repeated_calls=1, repeated_calls_dropped_tokens=len(more))
        reply.finish(Result([*first, *more], "", "length", stats))
        assert reply.ids == [*first, *more]
        assert reply.finish_reason == "tool_calls"
        assert reply.details["degenerate_kind"] == "repeated_calls"
        assert reply.content == "Let me look:"
        assert reply.shortened is not stream
        calls[stream] = [call.arguments for call in reply.done_calls]
    assert calls == {False: ['{"path": "a.txt"}'], True: ['{"path": "a.txt"}'] * 3}


BACKUP = CALL.replace("a.txt", "a.txt.old")


@pytest.mark.parametrize(
    ("turn", "ended", "paths"),
    [
        (f"{CALL}\n{CALL}\n{CALL}", True, ["a.txt"]),
        (f"{CALL}\nOnce more:\n{CALL}\nAnd again:\n{CALL}", True, ["a.txt"]),
        (f"{CALL}\n{CALL}\n{CALL}", False, ["a.txt"] * 3),
        (f"{CALL}\n{CALL}", False, ["a.txt"] * 2),
        (f"{CALL}\n{CALL}\n{BACKUP}\n{BACKUP}", False, ["a.txt"] * 2 + ["a.txt.old"] * 2),
        (f"{BACKUP}\n{CALL}\n{CALL}\n{CALL}", True, ["a.txt.old", "a.txt"]),
        (f"{CALL}\n{BACKUP}\n{CALL}\n{BACKUP}", False, ["a.txt", "a.txt.old"] * 2),
        (f"{CALL}\n{CALL}\nThat was all.", False, ["a.txt"] * 2),
        (f"{CALL}\n{CALL[:60]}", False, ["a.txt"]),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 500])
def test_a_stream_holds_equal_calls_back_until_they_are_wanted(
    tokenizer: Tokenizer, turn: str, ended: bool, paths: list[str], width: int
) -> None:
    ids = tokenizer.encode(turn, specials=False)
    reply = Reply(0, asked(stream=True), tokenizer, SYNTAXES["hermes"])
    reply.filter_repeated_calls = True
    plain = Reply(0, asked(stream=True), tokenizer, SYNTAXES["hermes"])
    events, all_events = [], []
    for i in range(0, len(ids), width):
        events += reply.push(Piece(tuple(ids[i : i + width]), ""))
        all_events += plain.push(Piece(tuple(ids[i : i + width]), ""))
    stats = Stats(prompt_tokens=5, output_tokens=len(ids))
    stats.recovery["repeated_calls"] += ended
    events += reply.finish(Result(ids, turn, "length", stats))
    all_events += plain.finish(Result(ids, turn, "length", stats))
    assert [json.loads(call.arguments)["path"] for call in reply.done_calls] == paths
    assert list(joined(events)) == list(joined(all_events))[: len(list(joined(events)))]
    assert reply.shortened is ended
    if not ended:
        assert list(joined(events)) == list(joined(all_events))
        assert (reply.content, len(reply.calls)) == (plain.content, len(plain.calls))


def test_a_stop_string_behind_a_call_leaves_the_call_to_be_answered(tokenizer: Tokenizer) -> None:
    turn = TURN.removesuffix("<|im_end|>") + "\n\nThe answer is STOP here"
    request = asked("messages", stop=("STOP",))
    reply, _ = replied(tokenizer, turn, request)
    whole = MessagesWriter(generation(reply, request)).to_json()
    assert reply.stop_string == "STOP"
    assert (reply.finish_reason, whole["stop_reason"]) == ("tool_calls", "tool_use")


@pytest.mark.parametrize("kind", ["repeat", "runaway", "period", "repeated_calls"])
def test_a_loop_is_told_by_a_flag_and_its_kind(tokenizer: Tokenizer, kind: str) -> None:
    reply, _ = replied(tokenizer, "Yes", asked(), end="length")
    assert reply.result is not None
    assert "degenerate_decode" not in reply.details
    reply.result.stats.recovery[kind] += 1
    assert reply.details["degenerate_decode"] is True
    assert reply.details["degenerate_kind"] == kind


def test_G10_a_loop_behind_a_whole_call_leaves_the_call_and_is_told(tokenizer: Tokenizer) -> None:
    request = asked("messages")
    reply, _ = replied(
        tokenizer, TURN.removesuffix("<|im_end|>") + " so" * 12, request, end="length"
    )
    assert reply.result is not None
    reply.result.stats.recovery["runaway"] += 1
    assert reply.finish_reason == "tool_calls"
    assert reply.details["degenerate_decode"] is True
    assert MessagesWriter(generation(reply, request)).to_json()["stop_reason"] == "tool_use"


def test_a_stop_string_of_markup_works_and_is_named(tokenizer: Tokenizer) -> None:
    reply, _ = replied(tokenizer, TURN, asked(stop=("</think>",)))
    assert reply.satisfied
    assert reply.reasoning.strip() == "Look first."
    assert reply.content == ""
    assert reply.stop_string == "</think>"
    assert reply.finish_reason == "stop"


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [True, False])
def test_a_past_tool_turn_is_in_the_prompt_as_the_model_wrote_it(
    tokenizer: Tokenizer, thinking: bool
) -> None:
    """The next prompt starts with the last one and its output, so the prefix cache hits."""
    turns, thought = ToolTurnCache(), SYNTAXES["hermes"].thought
    template = {} if thinking else {"enable_thinking": False}
    talk: list[dict] = [{"role": "user", "content": "Read a.txt"}]
    expected: list[int] = []
    for turn in range(4):
        request = asked(messages=parse_messages(talk), template_kwargs=template)
        prompt = chat_prompt(request, tokenizer, turns, thought)
        assert prompt.ids[: len(expected)] == expected
        raw = f" Odd  spacing {turn}:{CALL}"
        ids = tokenizer.encode(raw, specials=False)
        expected = prompt.ids + ids
        call_id = new_id("call_")
        function = {"name": "read_file", "arguments": '{"path":"a.txt"}'}
        call = {"id": call_id, "type": "function", "function": function}
        said = {"role": "assistant", "content": f"Odd  spacing {turn}:", "tool_calls": [call]}
        lead = prompt.lead()
        assert lead is not None
        turns.put(parse_messages([said])[0], [*lead, *ids])
        talk.append(said)
        talk.append({"role": "tool", "tool_call_id": call_id, "content": "hello"})


_CONFIG = SimpleNamespace(eos_token_ids=())
ENDLESS = SimpleNamespace(graph=SimpleNamespace(config=_CONFIG))  # an engine
CHANNELS = """{%- set named = namespace(tool=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set named.tool = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + named.tool }}
        {{- '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' and named.tool is none %}
        {{- raise_exception('a tool answers, but none was called') }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_turns_whose_header_names_a_channel_are_left_to_the_template(tokenizer: Tokenizer) -> None:
    """A turn after the header without a channel cannot follow the header of an answer."""
    harmony, turns = Tokenizer(tokenizer.core, CHANNELS, {}), ToolTurnCache()
    said = called("c")
    for talk in ([], [said, {"role": "tool", "content": "hello"}]):
        request = asked(messages=parse_messages([{"role": "user", "content": "Read a.txt"}, *talk]))
        prompt = chat_prompt(request, harmony, turns, None)
        generation: Any = SimpleNamespace(
            request=request, prompts=[prompt], model=SimpleNamespace(turns=turns, engine=ENDLESS)
        )
        reply: Any = SimpleNamespace(
            index=0,
            ids=[1, 2],
            content="Look:",
            finish_reason="tool_calls",
            calls=[ToolCall("c", "read_file", '{"path": "a.txt", "n": 1}', done=True)],
        )
        Generation._remember(generation, reply)
        assert not turns
    text = harmony.raw(prompt.ids)
    assert text.count("to=functions.read_file") == 1
    assert text.endswith("<|start|>assistant")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # omits past turns
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}go",
    ],
)
def test_turns_without_a_header_are_left_to_the_template(
    tokenizer: Tokenizer, template: str
) -> None:
    bare = Tokenizer(tokenizer.core, template, {})
    request = asked(messages=parse_messages([{"role": "user", "content": "Hi"}]))
    assert chat_prompt(request, bare, ToolTurnCache(), None).lead() is None


def test_unknown_calls_are_rendered_by_the_template(tokenizer: Tokenizer) -> None:
    function = {"name": "read_file", "arguments": '{"path": "a.txt"}'}
    talk = [
        {"role": "user", "content": "Read a.txt"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "hello"}]},
    ]
    request = asked(messages=parse_messages(talk))
    ids = chat_prompt(request, tokenizer, ToolTurnCache(), None).ids
    assert '{"name": "read_file", "arguments": {"path": "a.txt"}}' in tokenizer.showing(
        ["<tool_call>"]
    ).decode(ids)


def test_old_turns_are_forgotten_first() -> None:
    turns = ToolTurnCache(most_ids=10)
    for i in range(4):
        turns.put(called(str(i)), [i] * 4)
    recalled = [turns.lookup(called(str(i))) for i in range(4)]
    assert recalled == [None, None, (2,) * 4, (3,) * 4]


def called(call_id: str, content: str | None = "Look:", **changes: str) -> dict[str, Any]:
    function = {"name": "read_file", "arguments": '{"path": "a.txt", "n": 1}'} | changes
    call = {"id": call_id, "type": "function", "function": function}
    [message] = parse_messages([{"role": "assistant", "content": content, "tool_calls": [call]}])
    return message


def test_a_past_turn_that_the_client_changed_is_not_put_back() -> None:
    turns = ToolTurnCache()
    turns.put(called("c"), [1, 2])
    assert turns.lookup(called("c", arguments='{"n": 1.0,"path": "a.txt"}')) == (1, 2)
    assert turns.lookup(called("c", "Look:\n")) == (1, 2)
    assert turns.lookup(called("c", arguments='{"path": "b.txt", "n": 1}')) is None
    assert turns.lookup(called("c", "Look away:")) is None
    assert turns.lookup(called("c", None)) is None
    assert turns.lookup(called("c", name="write_file")) is None


def test_a_continued_message_ends_the_prompt(tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I"}]
    request = asked(messages=parse_messages(talk), continue_final_message=True, tools=[])
    assert tokenizer.decode(chat_prompt(request, tokenizer, ToolTurnCache(), None).ids).endswith(
        "Hello, I"
    )


def test_developer_is_system_and_neighbouring_system_messages_are_one() -> None:
    talk = parse_messages(
        [
            {"role": "developer", "content": "A"},
            {"role": "system", "content": [{"type": "text", "text": "B"}]},
            {"role": "user", "content": "C"},
            {"role": "system", "content": [{"type": "text", "text": text} for text in "DE"]},
            {"role": "system", "content": [{"type": "text", "text": text} for text in "FG"]},
        ]
    )
    said = [(m["role"], m["content"]) for m in talk]
    assert said[:2] == [("system", "A\n\nB"), ("user", "C")]
    assert said[2:] == [("system", ["D", "E\n\nF", "G"])]


def every_message(content: str) -> str:
    return "{% for m in messages %}<{{ " + content + " }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "seam"),
    [
        (every_message("m.content if m.content is string"), "\n"),
        (every_message("m.content | trim"), "\n"),
        (every_message("m.content.strip()"), "\n"),
        (every_message("m.content if m.content is string else m.content[0].text"), "\n"),
        (every_message("m.content if m.content is string else m.content | join('', 'text')"), ""),
        (None, ""),
    ],
)
def test_parts_of_a_text_are_joined_as_the_template_does_or_by_newlines(
    tokenizer: Tokenizer, template: str | None, seam: str
) -> None:
    """As in vLLM and llama.cpp. Parts of an assistant message are joined without a separator."""
    if template:
        tokenizer = Tokenizer(tokenizer.core, template, {})
    parts = [{"type": "text", "text": text} for text in "AB"]
    talk = [{"role": role, "content": parts} for role in ("user", "assistant", "user")]
    inputs = [m | {"content": [p | {"type": "input_text"} for p in parts]} for m in talk]
    asks = [
        decode_chat(json.dumps({"messages": talk}).encode()),
        decode_messages(json.dumps({"messages": talk, "max_tokens": 1}).encode()),
        decode_responses(json.dumps({"input": inputs}).encode()),
    ]
    one = [{"role": "user", "content": f"A{seam}B"}, {"role": "assistant", "content": "AB"}]
    wanted = tokenizer.chat([*one, one[0]])
    for request in asks:
        assert chat_prompt(request, tokenizer, ToolTurnCache(), None).ids == wanted
    assert tokenizer.chat(talk[:1]) == tokenizer.chat(one[:1])


GUARDED = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}
<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"""


def test_system_messages_lead_where_the_template_takes_them_nowhere_else(
    tokenizer: Tokenizer,
) -> None:
    talk = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "V"},
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "W"},
    ]
    wrap_handler = Tokenizer(tokenizer.core, GUARDED, {})

    def text(tokenizer: Tokenizer, *talk: dict[str, Any]) -> str:
        request = asked(messages=parse_messages(talk), tools=[])
        return tokenizer.raw(chat_prompt(request, tokenizer, ToolTurnCache(), None).ids)

    lifted = text(wrap_handler, *talk).replace("\n\n", "|").replace("\n", "")
    order = ["system", "user", "assistant", "user"]
    assert re.findall(r"<(\w+)>", lifted) == order
    assert "<system>A|B</system>" in lifted
    placed = text(tokenizer, *talk)
    assert placed.index("V") < placed.index("B") < placed.index("W")
    with pytest.raises(Problem, match="beginning"):
        text(Tokenizer(tokenizer.core, "{{ raise_exception('beginning') }}", {}), *talk)


# -- three formats, one request ----------------------------------------------------------------


def test_the_apis_ask_for_the_same() -> None:
    schema = TOOLS[0]["function"]["parameters"]
    function = {"name": "read_file", "arguments": '{"path": "x"}'}
    chat = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "T"},
        ],
        "tools": TOOLS,
        "temperature": 0.5,
        "max_tokens": 9,
    }  # fmt: skip
    anthropic = {
        "system": "S",
        "messages": [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "read_file", "input": {"path": "x"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1",
                 "content": [{"type": "text", "text": "T"}]}]},
        ],
        "tools": [{"name": "read_file", "input_schema": schema}],
        "temperature": 0.5,
        "max_tokens": 9,
    }  # fmt: skip
    responses = {
        "instructions": "S",
        "input": [
            {"role": "user", "content": "U"},
            {"type": "function_call", "call_id": "1"} | function,
            {"type": "function_call_output", "call_id": "1", "output": "T"},
        ],
        "tools": [{"type": "function", "name": "read_file", "parameters": schema}],
        "temperature": 0.5,
        "max_output_tokens": 9,
    }
    asks = [
        decode_chat(json.dumps(chat).encode()),
        decode_messages(json.dumps(anthropic).encode()),
        decode_responses(json.dumps(responses).encode()),
    ]
    talks = [[(m["role"], m["content"] or "") for m in request.messages or ()] for request in asks]
    assert talks[0] == talks[1] == talks[2]
    calls = [request.messages[2]["tool_calls"][0] for request in asks]  # type: ignore[index]
    assert calls[0] == calls[1] == calls[2]
    assert calls[0]["function"]["arguments"] == {"path": "x"}
    assert asks[0].declared_tools == asks[1].declared_tools == asks[2].declared_tools
    assert [a.options for a in asks] == [{"temperature": 0.5}] * 3
    assert [a.max_tokens for a in asks] == [9] * 3


EVERYWHERE = {  # fields of every API, and their values in the request
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 3,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "min_tokens": 2,
}
BODIES = {
    decode_chat: {"messages": [{"role": "user", "content": "U"}], "max_tokens": 9},
    decode_completion: {"prompt": "U", "max_tokens": 9},
    decode_responses: {"input": "U", "max_output_tokens": 9},
    decode_messages: {"messages": [{"role": "user", "content": "U"}], "max_tokens": 9},
}


@pytest.mark.parametrize("read", BODIES)
def test_extensions_mean_the_same_in_every_api(read: Any) -> None:
    more = {
        "logit_bias": {"5": 1.5},
        "speculative": {"block_size": 2},
        "stop": ["X"],
        "structured_outputs": {"regex": "a+", "disable_any_whitespace": False},
        "return_token_ids": True,
        "timings_per_token": True,
        "return_metrics": True,
        "return_meta_info": True,
        "timeout": 5,
        "thinking_token_budget": 50,
        "recovery": False,
        "store": True,
        "metadata": {"a": "b"},
    }
    request = read(json.dumps(BODIES[read] | EVERYWHERE | more).encode())
    assert request.options == EVERYWHERE | {"logit_bias": {"5": 1.5}, "block_size": 2}
    assert request.max_tokens == 9
    assert request.stop == ("X",)
    assert request.grammar == ("regex", "a+")
    assert request.return_token_ids and request.timings and request.metrics and request.meta_info  # noqa: PT018
    assert request.timeout == 5
    assert request.thinking_budget == 50
    assert request.recovery == OFF
    assert request.warnings == ()
    for off in ({"enabled": False}, {"mode": "off"}):
        request = read(json.dumps(BODIES[read] | {"speculative": off}).encode())
        assert request.options == {"speculative": False}


@pytest.mark.parametrize("read", BODIES)
def test_what_would_change_an_answer_and_is_not_served_is_refused(read: Any) -> None:
    for name, neutral in UNSUPPORTED.items():
        if name in read_fields(read):
            continue
        with pytest.raises(Problem, match=f"{name} is not supported") as caught:
            read(json.dumps(BODIES[read] | {name: "something"}).encode())
        assert (caught.value.status, caught.value.param) == (400, name)
        for value in (None, *neutral):
            request = read(json.dumps(BODIES[read] | {name: value}).encode())
            assert name in request.warnings[0]


def read_fields(read: Any) -> tuple[str, ...]:
    kinds = {
        decode_chat: ChatRequest,
        decode_completion: CompletionRequest,
        decode_responses: ResponsesRequest,
        decode_messages: MessagesRequest,
    }
    return kinds[read].__struct_fields__


def test_formats_and_efforts_are_found_where_each_api_has_them() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    config = {"format": flat, "effort": "low"}
    more: dict[Any, dict[str, Any]] = {
        decode_chat: {"response_format": form, "reasoning_effort": "low"},
        decode_responses: {"text": {"format": flat}, "reasoning": {"effort": "low"}},
        decode_messages: {"output_config": config},
    }
    for read, fields in more.items():
        request = read(json.dumps(BODIES[read] | fields).encode())
        assert request.grammar == ("json", schema)
        assert request.template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    wrong = {
        "reasoning.effort": {"reasoning": {"effort": 3}},
        "text.format": {"text": {"format": {"type": "yaml"}}},
        "conversation": {"conversation": "conv_1"},
        "prompt": {"prompt": {"id": "pmpt_1"}},
        "previous_response_id": {"previous_response_id": "resp_1"},
    }
    for param, fields in wrong.items():
        with pytest.raises(Problem) as caught:
            decode_responses(json.dumps(BODIES[decode_responses] | fields).encode())
        assert caught.value.param == param
    long = {"truncation": "auto", "text": {"verbosity": "low"}}
    request = decode_responses(json.dumps(BODIES[decode_responses] | long).encode())
    assert len(request.warnings) == 2


def test_tool_choice_none_offers_no_tools_and_names_have_to_be_declared() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    request = decode_chat(json.dumps(body | {"tool_choice": "none"}).encode())
    assert not request.tools
    assert not request.declared_tools
    named = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(Problem, match="read_file"):
        decode_chat(json.dumps(body | {"tool_choice": named}).encode())


def test_the_shipped_template_is_recognised(tokenizer: Tokenizer) -> None:
    found = syntax_of(tokenizer.template)
    assert found is not None
    assert found.name == "hermes"


@pytest.mark.parametrize(
    ("api", "writer", "place", "kinds"),
    [
        ("messages", MessagesWriter, ("content", "content_block"), ["tool_use", "text"]),
        ("responses", ResponsesWriter, ("output", "item"), ["function_call", "message"]),
    ],
)
def test_what_is_said_behind_a_call_stands_behind_it(
    tokenizer: Tokenizer, api: str, writer: Any, place: tuple[str, str], kinds: list[str]
) -> None:
    request = asked(api)
    reply, events = replied(tokenizer, f"{CALL}\nDone.<|im_end|>", request)
    whole, part = place
    assert [item["type"] for item in writer(generation(reply, request)).to_json()[whole]] == kinds
    chunks = streamed(writer(generation(reply, request)), reply, events)
    begun = ("content_block_start", "response.output_item.added")
    assert [c[part]["type"] for c in chunks if c["type"] in begun] == kinds


@pytest.mark.parametrize(
    ("api", "writer"),
    [("chat", ChatWriter), ("messages", MessagesWriter), ("responses", ResponsesWriter)],
)
def test_every_api_says_exactly_why_an_output_ended(
    tokenizer: Tokenizer, api: str, writer: Any
) -> None:
    request = asked(api)
    reply, events = replied(tokenizer, "Round and round", request, end="length")
    assert reply.result is not None
    reply.result.stats.recovery["repeat"] = 1
    whole = writer(generation(reply, request)).to_json()
    chunks = streamed(writer(generation(reply, request)), reply, events)
    found = whole["choices"][0] if api == "chat" else whole
    assert found["finish_details"]["degenerate_decode"] is True
    assert found["finish_details"]["degenerate_kind"] == "repeat"
    assert any(f'"finish_details": {json.dumps(reply.details)}' in json.dumps(c) for c in chunks)


def test_a_response_that_failed_says_so_by_a_code_that_clients_know(tokenizer: Tokenizer) -> None:
    reply, _ = replied(tokenizer, "So", request := asked("responses"))
    raw = ResponsesWriter(generation(reply, request)).error(
        Problem("x", status=500, code="compute_failed")
    )
    response = json.loads(raw.partition(b"data: ")[2])["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "x"}


@pytest.mark.parametrize("end", ["length", "stop"])
def test_an_item_that_was_cut_off_is_incomplete(tokenizer: Tokenizer, end: str) -> None:
    """A call that the model itself leaves unfinished is text, streamed or not."""
    request = asked("responses")
    reply, events = replied(tokenizer, CALL[: CALL.index("txt")], request, end=end)
    chunks = streamed(ResponsesWriter(generation(reply, request)), reply, events)
    done, *text = [c["item"] for c in chunks if c["type"] == "response.output_item.done"]
    assert (done["type"], done["status"]) == ("function_call", "incomplete")
    assert chunks[-1]["response"]["output"] == [done, *text]
    told = [item["content"][0]["text"] for item in text]
    assert told == ([] if end == "length" else [CALL[: CALL.index("txt")]])
    whole = ResponsesWriter(generation(reply, request)).to_json()["output"]
    assert [item["content"][0]["text"] for item in whole] == (told or [""])
    reply, events = replied(tokenizer, "Some text", request, end="length")
    [item] = ResponsesWriter(generation(reply, request)).to_json()["output"]
    chunks = streamed(ResponsesWriter(generation(reply, request)), reply, events)
    [done] = [c["item"] for c in chunks if c["type"] == "response.output_item.done"]
    assert (item["status"], done["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("5", {"raw": "5"}),
        ("[]", {"raw": "[]"}),
        ('{"x": NaN}', {"raw": '{"x": NaN}'}),
        ('{"x": 1e999}', {"raw": '{"x": 1e999}'}),
        ('{"x": "\\ud83d"}', {"x": "\ufffd"}),
        ('{"x": "\\ud83d\\ude00"}', {"x": "\U0001f600"}),
    ],
)
def test_the_input_of_a_tool_is_an_object_that_can_be_sent(
    tokenizer: Tokenizer, arguments: str, given: dict[str, str]
) -> None:
    request = asked("messages")
    text = f'<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    reply, _ = replied(tokenizer, text, request)
    [block] = MessagesWriter(generation(reply, request)).to_json()["content"]
    assert block["input"] == given
    encode(block)


def test_an_answer_that_was_begun_is_continued() -> None:
    def begun(*messages: dict[str, Any]) -> bool:
        body = {"max_tokens": 5, "messages": messages}
        return decode_messages(json.dumps(body).encode()).continue_final_message

    request = {"role": "user", "content": "Three colours?"}
    text = {"type": "text", "text": "1. red"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    assert begun(request, {"role": "assistant", "content": "1. red"})
    assert begun(request, {"role": "assistant", "content": [text]})
    assert not begun(request)
    assert not begun(request, {"role": "assistant", "content": [text, call]})


@pytest.mark.parametrize("nested", [True, False])
def test_allowed_tools_are_those_that_may_be_called(nested: bool) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    body = {"mode": "required", "tools": [{"type": "function", "name": "b"}]}
    choice = {"type": "allowed_tools"} | ({"allowed_tools": body} if nested else body)
    shown, declared, chosen = parse_tools(tools, choice)
    assert (shown, [tool.name for tool in declared], chosen.kind) == (tools, ["b"], "required")
    for wrong in ({"tools": []}, {"tools": [{"name": "c"}]}, {"mode": "all"}):
        with pytest.raises(Problem, match="tool_choice allows no declared tool"):
            parse_tools(tools, {"type": "allowed_tools", **body, **wrong})


def test_a_response_repeats_what_was_asked(tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    }
    repeated = {
        "instructions": "Be brief.",
        "max_output_tokens": 90,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": None},
        "safety_identifier": "s",
        "store": True,
        "text": {"format": form, "verbosity": "low"},
        "tool_choice": allowed,
        "tools": [tool],
        "user": "u",
    }

    def whole(body: dict[str, Any]) -> dict[str, Any]:
        request = decode_responses(json.dumps({"input": "hi"} | body).encode())
        reply, _ = replied(tokenizer, "{}", request)
        return ResponsesWriter(generation(reply, request)).to_json()

    assert repeated.items() <= whole(repeated).items()
    none = whole({"tools": [tool], "tool_choice": "none"})
    assert (none["tools"], none["tool_choice"]) == ([tool], "none")
    plain = {"background": False, "service_tier": "default", "truncation": "disabled"}
    plain |= {"store": True, "tool_choice": "auto", "text": {"format": {"type": "text"}}}
    found = whole({})
    assert plain.items() <= found.items()
    assert found["completed_at"] >= found["created_at"]


@pytest.mark.parametrize("stream", [False, True])
def test_later_requests_refer_to_a_response_and_to_its_items(
    tokenizer: Tokenizer, stream: bool
) -> None:
    kept = ResponseStore()
    flat = [{"type": "function"} | tool["function"] for tool in TOOLS]
    first = {"input": "Read a.txt", "tools": flat}

    def answered(**more: Any) -> dict[str, Any]:
        request = decode_responses(json.dumps(first | more).encode(), kept)
        reply, events = replied(tokenizer, TURN, request)
        writer = ResponsesWriter(generation(reply, request))
        return streamed(writer, reply, events)[-1]["response"] if stream else writer.to_json()

    def later(*items: Any, **more: Any) -> list[dict[str, Any]]:
        body = {"input": [*items, result], **more}
        return decode_responses(json.dumps(body).encode(), kept).messages or []

    answer = answered()
    question = {"role": "user", "content": "Read a.txt"}
    result = {"type": "function_call_output", "output": "x"}
    result["call_id"] = answer["output"][-1]["call_id"]
    whole = later(question, *answer["output"])
    assert [message["role"] for message in whole] == ["user", "assistant", "tool"]
    assert later(previous_response_id=answer["id"]) == whole
    refers = [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
    assert later(question, *refers) == whole
    for kind in ({}, {"type": None}):  # the type may be left out
        short = [{"id": item["id"]} | kind for item in answer["output"]]
        assert later(question, *short) == whole
    more = answered(previous_response_id=answer["id"])
    assert more["previous_response_id"] == answer["id"]
    assert later(previous_response_id=more["id"])[0] == question

    kept = ResponseStore(max_bytes=1)
    for gone in (answered(), answered(store=False)):
        with pytest.raises(Problem, match="not kept") as caught:
            later(previous_response_id=gone["id"])
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(Problem, match="not kept") as caught:
            later({"id": gone["output"][0]["id"]})
        assert caught.value.param == "input[0]"


def decoded(value: Any) -> Any:
    """Return the value as a client receives it: parts of it are encoded."""
    return json.loads(encode(value))


def test_parts_of_a_character_have_their_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é😀z", specials=False)
    entries = [TokenLogprob(i, -1.0, ()) for i in ids]
    said = [token["bytes"] for token in decoded(chat_logprobs(entries, tokenizer))["content"]]
    assert bytes(itertools.chain(*said)).decode() == "é😀z"


def test_tokens_may_be_written_as_bytes_or_as_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé", specials=False)
    entries = [TokenLogprob(i, -1.0, tuple((other, -2.0) for other in ids[1:])) for i in ids]
    found = decoded(completion_logprobs(entries, tokenizer))
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [set(top) for top in found["top_logprobs"]] == [
        {"a", "bytes:\\xc3", "bytes:\\xa9"}, {"bytes:\\xc3", "bytes:\\xa9"},
        {"bytes:\\xc3", "bytes:\\xa9"},
    ]  # fmt: skip
    names = [f"token_id:{i}" for i in ids]
    found = decoded(completion_logprobs(entries, tokenizer, as_ids=True))
    assert found["tokens"] == names
    assert set(found["top_logprobs"][0]) == set(names)
    content = decoded(chat_logprobs(entries, tokenizer, as_ids=True))["content"]
    assert [entry["token"] for entry in content] == names
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == names[1:]
    assert content[1]["bytes"] == [0xC3]
    for read, api in ((decode_chat, "chat"), (decode_completion, "completions")):
        body = BODIES[read] | {"return_tokens_as_token_ids": True, "logprobs": api == "chat" or 1}
        request = read(json.dumps(body).encode())
        assert request.warnings == ()
        reply, _ = replied(tokenizer, "aé", request)
        reply.logprobs = entries
        made = generation(reply, request)
        made.model.engine = SimpleNamespace(tokenizer=tokenizer)
        [choice] = (ChatWriter if api == "chat" else CompletionWriter)(made).to_json()["choices"]
        assert names[0] in json.dumps(decoded(choice["logprobs"]))


def test_offsets_are_places_in_the_text_and_the_said_token_is_among_the_likeliest(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("aé😀z<|im_end|>b", specials=False)
    assert ids[-2] in tokenizer._special
    entries = [TokenLogprob(i, -2.0, ((ids[0], -0.5),)) for i in ids]
    found = decoded(completion_logprobs(entries, tokenizer))
    text, offsets = tokenizer.decode(ids), found["text_offset"]
    assert [offsets[i] for i in (0, 1, -3, -2, -1)] == [text.index(c) for c in "aézbb"]
    assert offsets == sorted(offsets)
    assert found["top_logprobs"][-1] == {"a": -0.5, "b": -2.0}


def test_offsets_go_on_from_chunk_to_chunk(tokenizer: Tokenizer) -> None:
    request = asked("completions", logprobs=0, stream=True)
    reply = Reply(0, request, tokenizer, None)
    ids = tokenizer.encode("def add(a, b):", specials=False)
    writer = CompletionWriter(generation(reply, request))
    writer.generation.model.engine = SimpleNamespace(tokenizer=tokenizer)
    offsets = []
    for piece in pieces(tokenizer, ids, 1, logprobs=True):
        raw = writer.events(reply, reply.push(piece))
        offsets += json.loads(raw.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == completion_logprobs(reply.logprobs, tokenizer)["text_offset"]


WITHOUT_MARKUP = [  # outputs that contain no markup to parse
    pytest.param("completions", "hermes", {"tools": [], "declared_tools": ()}, id="completions"),
    pytest.param("completions", "hermes", {}, id="completions-with-tools"),
    pytest.param("chat", None, {}, id="no-syntax"),
    pytest.param("chat", "llama", {"tools": [], "declared_tools": ()}, id="no-tools-no-reasoning"),
    pytest.param("chat", None, {"max_tokens": 0}, id="no-output"),
]


@pytest.mark.parametrize(("api", "family", "changes"), WITHOUT_MARKUP)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), width=st.integers(1, 5), end=st.sampled_from(["stop", "length"]))
def test_the_engines_text_gives_the_answer_that_decoding_the_ids_gives(
    tokenizer: Tokenizer,
    api: str,
    family: str | None,
    changes: dict[str, Any],
    data: st.DataObject,
    width: int,
    end: str,
) -> None:
    """For any ids, including special tokens and incomplete characters."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=24))
    ids += data.draw(st.sampled_from([[], tokenizer.encode("é😀", specials=False)[:-1]]))
    dropped = data.draw(st.integers(0, min(len(ids), 3)))
    stream = data.draw(st.booleans())
    request = asked(api, logprobs=0, stream=stream, **changes)
    answers = []
    for takes_engine_text in (True, False):
        reply = Reply(0, request, tokenizer, SYNTAXES[family] if family else None)
        assert reply._takes_engine_text
        reply._takes_engine_text = takes_engine_text
        made = generation(reply, request)
        made.model.engine = SimpleNamespace(tokenizer=tokenizer)
        writer = (CompletionWriter if api == "completions" else ChatWriter)(made)
        writer.id, writer._created = "id", 0
        raw = [writer.start()]
        parts = pieces(tokenizer, ids, width, logprobs=True)
        for piece in parts[:-1]:
            raw.append(writer.events(reply, reply.push(piece)))
        stats = Stats(prompt_tokens=5, output_tokens=len(ids))
        stats.recovery["runaway_dropped_tokens"] = dropped
        last = reply.push(parts[-1]) if parts else []  # arrives together with the end
        last += reply.finish(Result(ids, "", end, stats))
        raw += [writer.events(reply, last), writer.close()]
        sent = raw if stream else writer.to_json()
        answers.append((sent, reply.content, reply.ids, reply.logprobs, reply.answer_logprobs))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("api", "family", "changes"),
    [
        pytest.param("chat", "hermes", {"tools": [], "declared_tools": ()}, id="reasoning"),
        pytest.param("chat", "llama", {}, id="tools"),
        pytest.param("completions", "hermes", {"stop": ("x",)}, id="stop-strings"),
    ],
)
def test_ids_are_decoded_again_where_markup_or_a_stop_string_has_to_be_found(
    tokenizer: Tokenizer, api: str, family: str, changes: dict[str, Any]
) -> None:
    reply = Reply(0, asked(api, **changes), tokenizer, SYNTAXES[family])
    assert not reply._takes_engine_text


def test_cached_tokens_of_several_prompts_are_added_up() -> None:
    def reply(n: int) -> Any:
        return SimpleNamespace(result=Result([], "", "stop", Stats(cached_tokens=n)))

    made = SimpleNamespace(request=asked(n=2), replies=[reply(n) for n in (0, 64, 128, 128)])
    assert reused(cast(Generation, made)) == 64 + 128
