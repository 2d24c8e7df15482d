"""Stop strings and output grammars that are too large get a 400 in every API."""

import json
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import ASK, CHAT, COMPLETIONS, MESSAGES
from dflash_jax.server.engine_options import MOST_GRAMMAR
from dflash_jax.tokenizer import Tokenizer
from tests.server.conftest import LiveServer

COMPLETE = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, ASK, "stop"),
        (COMPLETIONS, COMPLETE, "stop"),
        (MESSAGES, ASK | {"max_tokens": 2}, "stop_sequences"),
    ],
)
def test_stop_strings_beyond_a_bound_get_a_400_in_every_api(
    live: LiveServer, path: str, body: dict[str, Any], name: str
) -> None:
    for stop, bound in [(["x"] * 9000, "64"), (["x" * 300], "256"), (["x" * 256] * 60, "4096")]:
        response = httpx.post(live.url + path, json=body | {name: stop}, timeout=60)
        assert response.status_code == 400, response.text
        assert f"expected at most {bound}" in response.json()["error"]["message"]
    good = httpx.post(live.url + path, json=body | {name: ["x" * 64] * 64}, timeout=60)
    assert good.status_code == 200, good.text


LONG = {"type": "object", "title": "a" * MOST_GRAMMAR}
FUNCTION = {"name": "f", "parameters": LONG}


@pytest.mark.parametrize(
    "change",
    [
        {"guided_regex": "a" * (MOST_GRAMMAR + 1)},
        {"guided_grammar": "start: " + json.dumps("a" * MOST_GRAMMAR)},
        {"guided_choice": ["a" * MOST_GRAMMAR]},
        {"response_format": {"type": "json_object", "schema": LONG}},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ],
)
def test_structures_beyond_a_length_are_refused_before_anything_reads_them(
    live: LiveServer, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(
        live.engine.core.grammars, "decide", lambda given: bool(tried.append(given))
    )
    # The length of the prompt must not matter here.
    monkeypatch.setattr(Tokenizer, "render", lambda *given, **more: "x")
    response = httpx.post(live.url + CHAT, json=ASK | change, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "grammar_too_large"
    assert not tried
