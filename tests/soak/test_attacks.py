"""The bodies of the table of attacks, again and again, on a server in a process of its own."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.audit.attacks import OTHERS, Row, Target, attacked, attacks, target_server
from benchmarks.processes import memory_mb

BEYOND_IDLE = 1.0  # seconds that a neighbour may wait longer than while nothing else happens
ROUNDS = 5  # at most
GROWTH = 1.05  # of resident memory over the rounds before; the first ones leave gaps in the heap
SETTLED_S = 15  # in which memory is given back
ASK = {"prompt": "Hello", "max_tokens": 16, "return_token_ids": True}


def good(row: Row, quiet: Row) -> bool:
    """Whether a request was answered or refused, and kept no neighbour waiting."""
    waits = (row.health - quiet.health, row.stream - quiet.stream)
    return row.passed and max(waits) < BEYOND_IDLE


def sampled(target: Target) -> Iterator[float]:
    """Resident MB, once a second."""
    for _ in range(SETTLED_S):
        time.sleep(1)
        yield memory_mb(target.process.pid)["resident"]


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("--max-body", str(2**25))], ids=["default", "32 MiB"])
def test_no_request_kills_freezes_or_swells_a_server(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    with target_server(tmp_path / "log", *options) as target:

        def answer() -> list[int]:
            body = httpx.post(target.url + "/v1/completions", json=ASK, timeout=60).json()
            return body["choices"][0]["token_ids"]

        before = answer()
        quiet = attacked(target, "nothing", OTHERS["nothing"])
        table = {name: act for name, act in attacks(target.size) if name not in OTHERS}
        settled: list[float] = []
        for _ in range(ROUNDS):
            rows = [attacked(target, name, act) for name, act in table.items()]
            # A pause that does not come again is that of a busy machine.
            again = [
                attacked(target, row.name, table[row.name]) for row in rows if not good(row, quiet)
            ]
            bad = [row for row in again if not good(row, quiet)]
            assert not bad, "\n".join(map(str, bad))
            assert target.process.poll() is None
            assert answer() == before
            most = max(settled, default=0.0)
            settled.append(min(sampled(target)))
            if settled[-1] < GROWTH * most:
                return
        raise AssertionError(f"memory grows in every round: {settled} MB")
