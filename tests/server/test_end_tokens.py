"""The token that ends an output is no text of it, whether the tokenizer calls it special or not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tokenizers

from dflash_jax.engine.engine import Engine
from dflash_jax.server.run import ServerConfig
from dflash_jax.tokenizer import Tokenizer
from tests.server.conftest import LiveServer, run_server, twin

END, LETTER = 2040, 33
ASK = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}


def with_plain_ends(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose end tokens are added, but not special, as in many fine-tunes."""
    settings = json.loads(tokenizer.core.to_str())
    for token in settings["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in ("<|im_end|>", "</think>")
    core = tokenizers.Tokenizer.from_str(json.dumps(settings))
    return Tokenizer(core, tokenizer.template, tokenizer.specials)


@pytest.fixture(scope="module")
def engine(random_tiny: Engine) -> Engine:
    assert random_tiny.tokenizer is not None
    made = twin(random_tiny)
    made.tokenizer = with_plain_ends(random_tiny.tokenizer)
    return made


@pytest.fixture(scope="module")
def plain_ends(engine: Engine) -> Iterator[LiveServer]:
    live = run_server(lambda: engine, ServerConfig(port=0, drain=1))
    yield live
    live.stop()


def post(live: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


BIAS: dict[str, Any] = {"logit_bias": {str(END): 100}, "temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize("more", [{}, {"stop": ["never"]}, {"tools": [TOOL], "stop": ["never"]}])
def test_an_engine_returns_no_text_for_the_end_token(engine: Engine, more: Any) -> None:
    options: Any = {"max_tokens": 4, "logit_bias": {END: 100.0}} | more
    result = engine.generate("Hello", **options)
    assert (result.token_ids, result.text, result.finish_reason) == ([END], "", "stop")
    pieces = list(engine.submit("Hello", **options))
    assert "".join(piece.text for piece in pieces) == ""
    # What does not end the output is text.
    ignored = engine.generate("Hello", **options, ignore_eos=True)
    assert ignored.text == "<|im_end|>" * 4
    named = engine.generate("Hello", max_tokens=4, stop_token_ids=[LETTER], logit_bias={LETTER: 90})
    assert (named.token_ids, named.text) == ([LETTER], "")


def test_no_api_shows_the_end_token(plain_ends: LiveServer) -> None:
    chat = post(plain_ends, "chat/completions", messages=ASK, **BIAS, return_token_ids=True)
    [choice] = chat["choices"]
    assert (choice["message"]["content"], choice["token_ids"]) == ("", [END])
    stopped = post(plain_ends, "chat/completions", messages=ASK, **BIAS, stop=["x"])
    assert stopped["choices"][0]["message"]["content"] == ""
    assert post(plain_ends, "completions", prompt="a", **BIAS)["choices"][0]["text"] == ""
    assert post(plain_ends, "messages", messages=ASK, **BIAS)["content"] == []
    bias = BIAS | {"max_output_tokens": 4}
    del bias["max_tokens"]
    [item] = post(plain_ends, "responses", input="Hello", **bias)["output"]
    assert item["content"][0]["text"] == ""


def test_a_call_has_no_content_after_it(plain_ends: LiveServer) -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    tools = [{"type": "function", "function": TOOL}]
    body = {"messages": ASK, "tools": tools, "tool_choice": "required", "max_tokens": 100}
    body |= {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}
    body |= {"parallel_tool_calls": False, "return_token_ids": True}
    for limit in ({}, {"parallel_tool_calls": True, "logit_bias": {str(END): 50}}):
        [choice] = post(plain_ends, "chat/completions", **(body | limit))["choices"]
        assert choice["message"]["content"] is None
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]
    assert choice["token_ids"][-1] == END


def test_a_requested_end_token_is_kept_where_the_request_says_so(plain_ends: LiveServer) -> None:
    ask: dict[str, Any] = {"prompt": "a", "max_tokens": 4, "stop_token_ids": [LETTER]}
    ask |= {"logit_bias": {str(LETTER): 100}}
    for keep in (False, True):
        [choice] = post(plain_ends, "completions", **ask, include_stop_str_in_output=keep)[
            "choices"
        ]
        assert choice["text"] == ("B" if keep else "")
        assert choice["stop_reason"] == LETTER


def test_markup_that_ends_an_output_is_read(plain_ends: LiveServer) -> None:
    """The end of a call as an end token completes the call."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    tools = [{"type": "function", "function": TOOL}]
    body: dict[str, Any] = {"messages": ASK, "tools": tools, "tool_choice": "required"}
    body |= {"max_tokens": 100, "stop_token_ids": [2044], "temperature": 0}
    body |= {"chat_template_kwargs": {"enable_thinking": False}}
    [choice] = post(plain_ends, "chat/completions", **body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
