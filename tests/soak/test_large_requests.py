"""The whole list of attacks, twice, against a server in a process of its own."""

import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.soak.large_requests import Finding, attack, idle, memory, served

BEYOND_IDLE = 1.0  # seconds that a neighbour may wait longer than while nothing else happens
GROWTH = 1.05  # of resident memory, from the end of the first round to that of the second
SETTLED_S = 15  # in which memory is given back
ASK = {"prompt": "Hello", "max_tokens": 16, "return_token_ids": True}


def good(finding: Finding, quiet: Finding) -> bool:
    """Whether a request was answered or refused, and kept no neighbour waiting."""
    refused = 400 <= finding.status < 500 or finding.status in (200, 503)
    waits = (finding.health - quiet.health, finding.stream - quiet.stream)
    return refused and max(waits) < BEYOND_IDLE


def sampled(process: subprocess.Popen) -> Iterator[int]:
    """Resident MB, once a second."""
    for _ in range(SETTLED_S):
        time.sleep(1)
        yield memory(process)


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("--max-body", str(2**25))], ids=["default", "32 MiB"])
def test_no_request_kills_freezes_or_swells_a_server(options: tuple[str, ...]) -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    with served(*options) as (process, url):

        def answer() -> list[int]:
            body = httpx.post(url + "/v1/completions", json=ASK, timeout=60).json()
            return body["choices"][0]["token_ids"]

        before, quiet, settled = answer(), idle(url), []
        for _ in range(2):
            bad = [finding for finding in attack(url, process) if not good(finding, quiet)]
            # A pause that does not come again is that of a busy machine.
            again = [each for one in bad for each in attack(url, process, chosen=one.label)]
            bad = [finding for finding in again if not good(finding, quiet)]
            assert not bad, "\n".join(map(str, bad))
            assert process.poll() is None
            assert answer() == before
            settled.append(min(sampled(process)))
        assert settled[1] < GROWTH * settled[0], settled
