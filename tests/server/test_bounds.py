"""Stop strings and output grammars that are too large get a 400 in every API."""

from typing import Any

import httpx
import pytest

from benchmarks.soak_serve import ASK, CHAT, COMPLETIONS, MESSAGES
from tests.server.conftest import Live

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
    live: Live, path: str, body: dict[str, Any], name: str
) -> None:
    for stop, bound in [(["x"] * 9000, "64"), (["x" * 300], "256"), (["x" * 256] * 60, "4096")]:
        response = httpx.post(live.url + path, json=body | {name: stop}, timeout=60)
        assert response.status_code == 400, response.text
        assert f"expected at most {bound}" in response.json()["error"]["message"]
    good = httpx.post(live.url + path, json=body | {name: ["x" * 64] * 64}, timeout=60)
    assert good.status_code == 200, good.text
