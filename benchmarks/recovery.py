"""Host time of recovery's rules per token, the table in docs/recovery.md.

    python -m benchmarks.recovery

No rule acts, as in healthy traffic, so outputs are equal.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import dflash_jax as dj
from benchmarks.paired import markdown
from dflash_jax.bench.endings import TOOLS
from dflash_jax.bench.replay import Turn, prompt_of, read_turns
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.state_machine import OFF, controller

HEADINGS = "rule | microseconds per token | per output"


def only(**fields: Any) -> dj.Recovery:
    return dataclasses.replace(OFF, **fields)


ENDS = only(floor=256, below_floor="odds", tool_prefix=True)
# Rules by name: the settings with the rule, and those without it.
RULES: dict[str, tuple[dj.Recovery, dj.Recovery]] = {
    "loops by length and text, with and without a counter (`runaway`)": (
        only(runaway="measured"),
        OFF,
    ),
    '12 copies (`runaway="compat"`)': (only(runaway="compat"), OFF),
    "equal tokens (`repeat_limit=32`)": (only(repeat_limit=32), OFF),
    "equal calls and their number (`repeated_calls`, `max_calls`)": (
        only(repeated_calls=3, max_calls=48),
        OFF,
    ),
    "end tokens (`floor`, `tool_prefix`)": (ENDS, OFF),
    "held calls (`call_retry`)": (dataclasses.replace(ENDS, call_retry=True), ENDS),
    "limit of a thought (`answer_reserve=16`)": (only(answer_reserve=16), OFF),
    "least length (`min_tokens=1`)": (only(min_tokens=1), OFF),
    "empty outputs (`empty_retry`)": (only(empty_retry=True), OFF),
    "all by default (`dj.Recovery()`)": (dj.Recovery(), OFF),
}


def events_of(engine: Engine, turn: Turn) -> tuple[RequestHandle, list[controller.Event]]:
    """A request with recovery on, and the device's events in its history."""
    heard: list[controller.Event] = []
    live = engine.submit(
        prompt_of(turn, engine),
        max_tokens=turn.max_tokens,
        recovery=dj.Recovery(answer_reserve=16, deadline_s=3600),
        tools=turn.tools or TOOLS,
    )
    judge = live.sequence.take
    live.sequence.take = lambda event, logprobs=None: (heard.append(event), judge(event))[1]  # pyrefly: ignore
    while not live.done:
        engine.advance()
    return live, heard


def replay_s(policy: controller.Policy, events: list[controller.Event]) -> float:
    """Return the seconds that the state machine takes for a whole history."""
    started = time.perf_counter()
    state = controller.State()
    for event in events:
        state, _ = controller.advance(state, event, policy)
    return time.perf_counter() - started


def rows(engine: Engine, turns: list[Turn], repeats: int) -> Iterator[tuple[str, str, str]]:
    """Yield each rule, and the microseconds of the host that it adds per token and per output."""
    histories = [events_of(engine, turn) for turn in turns]
    healthy = [(live, heard) for live, heard in histories if not live.stats.recovery]
    tokens = sum(len(live.token_ids) for live, _ in healthy)
    settings = dict.fromkeys(itertools.chain(*RULES.values()), math.inf)
    best = {(s, i): math.inf for s in settings for i in range(len(healthy))}
    for _ in range(repeats):  # interleaved, so that load meets all alike
        for (recovery, i), shortest in best.items():
            live, heard = healthy[i]
            policy = dataclasses.replace(live.sequence.policy, recovery=recovery)
            best[recovery, i] = min(shortest, replay_s(policy, heard))
    total = {s: 1e6 * sum(best[s, i] for i in range(len(healthy))) for s in settings}
    for name, (on, off) in RULES.items():
        added = max(total[on] - total[off], 0.0)
        yield name, f"{added / tokens:.1f}", f"{added / len(healthy):.0f}"


def main() -> None:
    turns = [turn for turn in read_turns(SHIPPED) if turn.kind == "chat"]
    engine = dj.load("tiny", plan=dj.Plan(max_length=1024))
    engine.measures_drafting = False
    engine.warm_up("greedy", "recovery")
    print("\n".join(markdown(HEADINGS, rows(engine, turns, repeats=60))))


if __name__ == "__main__":
    main()
