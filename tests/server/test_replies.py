"""Responses of the four APIs to the same output: reasoning, calls, ends. Without an engine."""

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.result import Piece, Result, Stats, TokenLogprob
from dflash_jax.engine.state_machine.announcements import introduces_call
from dflash_jax.server.anthropic import MessagesWriter, decode_messages
from dflash_jax.server.completions import (
    ChatWriter,
    CompletionWriter,
    decode_chat,
    decode_completion,
)
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs, completion_logprobs
from dflash_jax.server.protocol import Problem
from dflash_jax.server.reply import Reply
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.responses import ResponsesWriter, decode_responses
from dflash_jax.server.tools import parse_tools
from dflash_jax.server.writer import all_cached_tokens, encode
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, syntax_of
from dflash_jax.tool_parsers.calls import joined
from tests.server.replies import CALL, TOOLS, TURN, asked, generation, pieces, replied, streamed
from tests.server.test_formats import BODIES


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


@pytest.mark.parametrize("width", [1, 1000])
def test_a_call_in_a_code_fence_is_a_call_even_with_stop_strings(
    tokenizer: Tokenizer, width: int
) -> None:
    said = 'I read it:\n```json\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n```'
    for fenced, stop in itertools.product((introduces_call, None), ((), ("path",))):
        ids = tokenizer.encode(said, specials=False)
        reply = Reply(0, asked(stop=stop), tokenizer, SYNTAXES["hermes"], fenced=fenced)
        for piece in pieces(tokenizer, ids, width):
            reply.push(piece)
        reply.finish(Result(ids, said, "stop", Stats(prompt_tokens=5, output_tokens=len(ids))))
        calls = [(call.name, call.arguments) for call in reply.done_calls]
        if fenced:
            assert calls == [("read_file", '{"path": "a.txt"}')]
            assert (reply.content, reply.finish_reason) == ("I read it:", "tool_calls")
        else:
            assert calls == []
            assert reply.content == (said.partition("path")[0] if stop else said)


OBJECT = CALL.split("\n")[1]


@pytest.mark.parametrize("width", [1, 1000])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        pytest.param(f"I read it:\n```json\n{OBJECT}\n```", "I read it:", id="fenced"),
        pytest.param(f"I read it:\n{CALL}\n", "I read it:", id="tagged"),
        pytest.param(f"<think>\nhm\n</think>\n\nSo.\n{CALL}\n{CALL}", "So.", id="thought"),
        pytest.param(f"An example:\n```json\n{OBJECT}\n```", None, id="example"),
        pytest.param(f"So:\n```json\n{OBJECT}\n```\nIt is.", None, id="fence-within-text"),
        pytest.param("So:\n```py\nx = 1\n```", None, id="code"),
        pytest.param('{"name": "Ann", "age": 3}', None, id="object"),
        pytest.param("<tool_call>\n{bad}\n</tool_call>", None, id="no-call"),
    ],
)
def test_log_probabilities_of_a_message_are_those_of_the_tokens_that_it_shows(
    tokenizer: Tokenizer, said: str, shown: str | None, width: int
) -> None:
    ids = tokenizer.encode(said, specials=False)
    request = asked("responses", logprobs=0, stream=True)
    reply = Reply(0, request, tokenizer, SYNTAXES["hermes"], fenced=introduces_call)
    made = generation(reply, request)
    made.model.engine = SimpleNamespace(tokenizer=tokenizer)
    events = [reply.push(piece) for piece in pieces(tokenizer, ids, width, logprobs=True)]
    events.append(reply.finish(Result(ids, said, "stop", Stats(output_tokens=len(ids)))))
    chunks = streamed(ResponsesWriter(made), reply, events)
    deltas = [chunk for chunk in chunks if chunk["type"] == "response.output_text.delta"]
    tokens = "".join(entry["token"] for delta in deltas for entry in delta["logprobs"])
    assert tokens.strip() == (shown or said)
    assert "".join(delta["delta"] for delta in deltas) == (shown or said)


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
    assert all_cached_tokens(cast(Generation, made)) == 64 + 128
