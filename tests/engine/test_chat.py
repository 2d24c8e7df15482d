"""Conversations in one call, handles that wait, and engines that close themselves."""

import threading
from typing import Any

import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.errors import RequestError
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.sources import locate

MESSAGES = [{"role": "user", "content": "List three colours."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny_target(num_layers=2, vocab_size=2048, max_length=1024)
    made = random_engine(
        target, tiny_drafter(target), Plan(rows=2, max_length=512, chunk=64, block=4)
    )
    made.tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    return made


def test_a_chat_is_its_template_generated(engine: Engine) -> None:
    wanted = engine.generate(engine.chat_ids(MESSAGES), max_tokens=12)
    found = engine.chat(MESSAGES, max_tokens=12)
    assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
    assert engine.chat(MESSAGES[0]["content"], max_tokens=12).token_ids == wanted.token_ids
    stream = engine.chat(MESSAGES, stream=True, max_tokens=12)
    assert isinstance(stream, RequestHandle)
    assert [i for piece in stream for i in piece.token_ids] == wanted.token_ids


@pytest.mark.parametrize(
    "tool",
    [
        CHAT_TOOL,
        {"type": "function"} | FUNCTION,  # Responses
        {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA},  # Messages
    ],
)
def test_a_chat_offers_tools_of_any_api(engine: Engine, tool: dict[str, Any]) -> None:
    prompt = engine.chat_ids(MESSAGES, tools=[CHAT_TOOL])
    assert len(prompt) > len(engine.chat_ids(MESSAGES))
    found = engine.chat(MESSAGES, tools=[tool], tool_choice="auto", max_tokens=8)
    assert found.stats.prompt_tokens == len(prompt)
    assert found.token_ids == engine.generate(prompt, max_tokens=8).token_ids


def test_a_chat_passes_variables_to_the_template(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(engine, "chat_ids", lambda *args, **kw: seen.append((args, kw)) or PROMPT)
    engine.chat(MESSAGES, max_tokens=2, chat_template_kwargs={"enable_thinking": False})
    assert seen == [((MESSAGES,), {"enable_thinking": False, "parse_special": False})]


def test_messages_that_are_none_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"a message is 'role'; expected dicts"):
        engine.chat(MESSAGES[0])
    with pytest.raises(RequestError, match="messages is 7; expected a list of messages"):
        engine.chat(7)


def test_a_handle_waits_for_its_result(engine: Engine) -> None:
    handles = [engine.submit([i, 2, 3], max_tokens=9) for i in range(4)]  # for two rows
    results = [handle.result() for handle in reversed(handles)][::-1]
    alone = [engine.generate([i, 2, 3], max_tokens=9) for i in range(4)]
    assert [x.token_ids for x in results] == [x.token_ids for x in alone]
    [unqueued] = engine.prepare(PROMPT, max_tokens=2)
    with pytest.raises(RequestError, match=r"is not queued; give it to `Engine\.enqueue` first"):
        unqueued.result()


def test_handles_may_wait_in_several_threads(engine: Engine) -> None:
    handles = [engine.submit([i, 2, 3], max_tokens=9) for i in range(4)]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i, h=h: found.update({i: h.result().token_ids}))
        for i, h in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(4)] == [
        engine.generate([i, 2, 3], max_tokens=9).token_ids for i in range(4)
    ]


def test_an_engine_is_a_context_that_closes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    with engine as entered:
        assert entered is engine
        assert not closed
    with pytest.raises(KeyError), engine:
        raise KeyError
    assert len(closed) == 2
