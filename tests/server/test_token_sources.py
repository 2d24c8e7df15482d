"""`return_token_sources`: the rounds of decoding in responses and streams."""

import json
from typing import Any

import httpx
import pytest

from dflash_jax.engine.result import Piece, Result, RoundTrace, Stats
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import ChatWriter
from dflash_jax.server.reply import Reply
from dflash_jax.server.responses import decode_responses
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.server.conftest import LiveServer
from tests.server.test_replies import CALL, TURN, asked, decoded, generation, streamed

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "n": 2}
SAMPLED = {"temperature": 1.0, "seed": 3}
COMPLETE = {"prompt": "Hello", "max_tokens": 24}
PATHS = {"/v1/chat/completions": ASK | SAMPLED, "/v1/completions": COMPLETE}


def post(live: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    return httpx.post(live.url + path, json=PATHS[path] | fields, timeout=60).json()


def chunks(live: LiveServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = PATHS[path] | {"stream": True} | fields
    lines = httpx.post(live.url + path, json=body, timeout=60).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def timeless(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k != "ms"} for each in rounds]


@pytest.mark.parametrize("path", PATHS)
def test_rounds_are_those_of_the_output_whole_and_streamed(live: LiveServer, path: str) -> None:
    sources = {"return_token_sources": True}
    whole = post(live, path, return_token_ids=True, **sources)["choices"]
    plain = post(live, path, return_token_ids=True)["choices"]
    parts = chunks(live, path, **sources)
    assert live.engine.tokenizer is not None
    for choice, other in zip(whole, plain, strict=True):
        assert "rounds" not in other
        assert choice["token_ids"] == other["token_ids"]
        rounds = choice["rounds"]
        tokens = [token for each in rounds for token in each["tokens"]]
        assert [token["id"] for token in tokens] == choice["token_ids"]
        text = live.engine.tokenizer.raw(choice["token_ids"])
        assert text.startswith("".join(token["text"] for token in tokens))
        assert (rounds[0]["proposed"], rounds[0]["tokens"][0]["source"]) == (0, "target")
        assert all(each["proposed"] == 3 for each in rounds[1:-1])
        assert all(len(each["rejected"]) == 3 - each["accepted"] for each in rounds[1:-1])
        assert all(each["ms"] >= 0 for each in rounds)
        own = [c["choices"][0] for c in parts if c["choices"][0]["index"] == choice["index"]]
        assert timeless([each for c in own for each in c["rounds"]]) == timeless(rounds)
        assert len([c for c in own if c["rounds"]]) > 2
    assert all("rounds" not in c["choices"][0] for c in chunks(live, path))


def test_the_rounds_of_a_request_without_drafting_are_plain(live: LiveServer) -> None:
    more = {"return_token_sources": True, "speculative": {"enabled": False}}
    [choice] = post(live, "/v1/completions", **more)["choices"]
    assert {(each["proposed"], len(each["tokens"])) for each in choice["rounds"]} == {(0, 1)}


@pytest.mark.parametrize("stop", [2, 9])
def test_rounds_end_with_the_output_at_a_stop_text(live: LiveServer, stop: int) -> None:
    text = post(live, "/v1/completions")["choices"][0]["text"][stop : stop + 2]
    more = {"return_token_sources": True, "return_token_ids": True, "stop": text}
    [choice] = post(live, "/v1/completions", **more)["choices"]
    ids = [token["id"] for each in choice["rounds"] for token in each["tokens"]]
    assert ids == choice["token_ids"]
    assert choice["finish_reason"] == "stop"


def test_other_apis_list_the_field_as_unknown() -> None:
    body = {"return_token_sources": True, "max_tokens": 9}
    messages = decode_messages(json.dumps(body | ASK | {"n": 1}).encode())
    responses = decode_responses(json.dumps({"input": "U", "return_token_sources": True}).encode())
    for request in (messages, responses):
        assert any("return_token_sources" in warning for warning in request.warnings)


@pytest.mark.parametrize("parallel", [True, False])
def test_rounds_of_held_text_are_sent_once_and_in_order(
    tokenizer: Tokenizer, parallel: bool
) -> None:
    """Also where the output ends with the only allowed call, before the engine ends it."""
    text = TURN if parallel else TURN.replace("<|im_end|>", CALL)
    ids = tokenizer.encode(text, specials=False)
    rounds = [
        RoundTrace(tuple(ids[i : i + 3]), ("drafted",) * len(ids[i : i + 3]), 3, 2)
        for i in range(0, len(ids), 3)
    ]
    for stream in (True, False):
        request = asked(stream=stream, return_token_sources=True, parallel_tool_calls=parallel)
        reply = Reply(0, request, tokenizer, SYNTAXES["hermes"])
        events = [reply.push(Piece(x.tokens, "", (), (x,))) for x in rounds]
        stats = Stats(prompt_tokens=5, output_tokens=len(ids))
        events.append(reply.finish(Result(ids, text, "stop", stats)))
        writer = ChatWriter(generation(reply, request))
        if stream:
            choices = [c["choices"][0] for c in streamed(writer, reply, events)]
        else:
            choices = decoded(writer.to_json())["choices"]
        sent = [token["id"] for c in choices for each in c["rounds"] for token in each["tokens"]]
        assert sent == reply.ids
        assert (reply.ids == ids) is parallel


def test_a_round_is_held_until_the_next_chunk(tokenizer: Tokenizer) -> None:
    request = asked(stream=True, return_token_sources=True)
    reply = Reply(0, request, tokenizer, SYNTAXES["hermes"])
    writer = ChatWriter(generation(reply, request))
    [tag] = tokenizer.encode("<think>", specials=False)
    hidden = Piece((tag,), "", (), (RoundTrace((tag,), ("target",)),))
    assert writer.events(reply, reply.push(hidden)) == b""
    word = tokenizer.encode("Look", specials=False)
    shown = Piece(tuple(word), "", (), (RoundTrace(tuple(word), ("target",) * len(word)),))
    [line] = writer.events(reply, reply.push(shown)).decode().strip().splitlines()
    [choice] = json.loads(line.removeprefix("data: "))["choices"]
    assert [len(each["tokens"]) for each in choice["rounds"]] == [1, len(word)]
