"""Answers that a client began: the output continues their text, or their reasoning."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dflash_jax.engine.vocabulary import opens_thought
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat, decode_completion
from dflash_jax.server.prompt import EncodedPrompt, chat_prompt, prepare
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.reply import Reply
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.server.conftest import LiveServer
from tests.server.test_replies import pieces

USER = {"role": "user", "content": "Hi"}
THOUGHT = {"type": "thinking", "thinking": "Let me", "signature": ""}


def prompted(request: GenerationRequest, tokenizer: Tokenizer) -> EncodedPrompt:
    return chat_prompt(request, tokenizer, ToolTurnCache(), SYNTAXES["hermes"].thought)


def chat(*messages: Any) -> GenerationRequest:
    body = {"messages": messages, "continue_final_message": True}
    return decode_chat(json.dumps(body).encode())


def anthropic(content: Any) -> GenerationRequest:
    talk = [USER, {"role": "assistant", "content": content}]
    return decode_messages(json.dumps({"messages": talk, "max_tokens": 5}).encode())


def begun(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


BEGUN: list[tuple[GenerationRequest, str, bool]] = [
    (chat(USER, begun(content="<think>\nLet me")), "<think>\nLet me", True),
    (chat(USER, begun(content="<think>")), "<think>", True),
    (chat(USER, begun(content=None, reasoning_content="Let me")), "<think>\nLet me", True),
    (chat(USER, begun(content="<think>\nYes.\n</think>\n\nHello")), "</think>\n\nHello", False),
    (chat(USER, begun(content="Hello")), "Hello", False),
    (chat(USER, begun(content="")), "assistant\n", False),
    (chat({"role": "user", "content": "Is <think> a tag"}, begun(content="Yes")), "Yes", False),
    (chat(USER, begun(content="<think>a"), USER, begun(content="a")), "assistant\na", False),
    (anthropic("<think>\nLet me"), "<think>\nLet me", True),
    (anthropic([{"type": "text", "text": "<think>\nLet me"}]), "<think>\nLet me", True),
    (anthropic([THOUGHT]), "<think>\nLet me", True),
    (anthropic([THOUGHT, {"type": "text", "text": "Hello"}]), "</think>\n\nHello", False),
]


@pytest.mark.parametrize(("request_", "end", "thinking"), BEGUN)
def test_a_thought_that_was_begun_is_continued_as_one(
    tokenizer: Tokenizer, request_: GenerationRequest, end: str, thinking: bool
) -> None:
    prompt = prompted(request_, tokenizer)
    assert tokenizer.raw(prompt.ids).endswith(end)
    assert prompt.thinking == thinking
    assert opens_thought(tokenizer, prompt.ids) == thinking
    reply = Reply(0, request_, tokenizer, SYNTAXES["hermes"], thinking=prompt.thinking)
    ids = tokenizer.encode(" see.\n</think>\n\nDone." if thinking else " there", specials=False)
    for piece in pieces(tokenizer, ids, 2):
        reply.push(piece)
    assert reply.reasoning.rstrip() == (" see." if thinking else "")
    assert reply.content == ("Done." if thinking else " there")
    assert (reply.thinking_tokens > 0) == thinking


def test_a_text_without_a_header_opens_no_thought(tokenizer: Tokenizer) -> None:
    start = tokenizer.encode("<|endoftext|>", specials=False)
    for text in ("Explain <think> tags", "a"):
        ids = tokenizer.encode(text, specials=False)
        assert not opens_thought(tokenizer, ids)
        assert not opens_thought(tokenizer, [*start, *ids])


def test_tokens_of_a_continued_thought_are_counted_as_reasoning(live: LiveServer) -> None:
    turn = {"role": "assistant", "content": "<think>\nLet me"}
    body = {"messages": [USER, turn], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    chats, messages = f"{live.url}/v1/chat/completions", f"{live.url}/v1/messages"
    more = {"continue_final_message": True}
    answer = httpx.post(chats, json=body | more, timeout=120).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert answer["choices"][0]["message"]["content"] == ""
    answer = httpx.post(messages, json=body, timeout=120).json()
    assert [block["type"] for block in answer["content"]] == ["thinking"]


def test_a_short_text_is_encoded_without_a_change_of_threads(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    encode = tokenizer.encode

    def noted(*arguments: Any, **more: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*arguments, **more)

    monkeypatch.setattr(tokenizer, "encode", noted)
    engine = SimpleNamespace(tokenizer=tokenizer, plan=SimpleNamespace(max_length=4096))
    model: Any = SimpleNamespace(engine=engine)
    for prompt in ("Hi", "Hi " * 2000):
        request = decode_completion(json.dumps({"prompt": prompt}).encode())
        [encoded] = asyncio.run(prepare(model, request))
        assert encoded.ids == encode(prompt)
    short, long = threads
    assert short is threading.main_thread()
    assert long is not short
    request = decode_completion(json.dumps({"prompt": "Hi, " * 100}).encode())
    engine.plan.max_length = 1
    with pytest.raises(Problem, match="prompt is too long") as caught:
        asyncio.run(prepare(model, request))
    assert caught.value.code == "context_length_exceeded"
