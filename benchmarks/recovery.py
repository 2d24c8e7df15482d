"""Cost of recovery: host time of its rules per token and step, and paired whole generations.

    python -m benchmarks.recovery                 # all
    python -m benchmarks.recovery --rules-only    # the table of rules, in docs/recovery.md

No rule acts, as in healthy traffic, so outputs are equal.
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import dflash_jax as dj
from benchmarks.environment import write_result
from benchmarks.paired import interleaved, ratio, spread
from dflash_jax.bench.endings import TOOLS
from dflash_jax.bench.replay import Turn, prompt_of, read_turns
from dflash_jax.cli.replay import SHIPPED
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.state_machine import OFF, controller

SETTINGS = {
    "off": OFF,
    "on": dj.Recovery(answer_reserve=16, deadline_s=3600),
}


def only(**fields: Any) -> dj.Recovery:
    """Return settings with one rule."""
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
        recovery=SETTINGS["on"],
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


def machine(engine: Engine, turns: list[Turn], repeats: int) -> dict[str, float]:
    """Measure host microseconds per step, rules off and on, over the shortest step time."""
    per_step: dict[str, list[float]] = {name: [] for name in SETTINGS}
    steps_s: list[float] = []
    for turn in turns:
        live, heard = events_of(engine, turn)
        steps_s.append(live.stats.decode_s / max(len(heard) - 1, 1))
        for name, recovery in SETTINGS.items():
            policy = dataclasses.replace(live.sequence.policy, recovery=recovery)
            best = min(replay_s(policy, heard) for _ in range(repeats))
            per_step[name].append(best / len(heard))
    off, on = (statistics.median(per_step[name]) for name in ("off", "on"))
    step = min(steps_s)  # the strictest choice: load makes steps longer
    return {
        "machine_off_us": 1e6 * off,
        "machine_on_us": 1e6 * on,
        "step_us": 1e6 * step,
        "overhead": (on - off) / step,
    }


def rules(engine: Engine, turns: list[Turn], repeats: int) -> list[dict[str, Any]]:
    """Measure each rule alone, in microseconds of the host per token of whole outputs."""
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
    return [
        {
            "rule": name,
            "us_per_token": (total[on] - total[off]) / tokens,
            "us_per_output": (total[on] - total[off]) / len(healthy),
        }
        for name, (on, off) in RULES.items()
    ]


def table(costs: list[dict[str, Any]]) -> str:
    """Return the costs of rules as a table in Markdown."""
    lines = ["| rule | microseconds per token | per output |", "| --- | --- | --- |"]
    for line in costs:
        each, whole = max(line["us_per_token"], 0.0), max(line["us_per_output"], 0.0)
        lines.append(f"| {line['rule']} | {each:.1f} | {whole:.0f} |")
    return "\n".join(lines)


def whole(engine: Engine, turns: list[Turn], pairs: int) -> dict:
    """Measure paired decoding times of all turns, on over off."""

    def decode_all(name: str) -> float:
        options = {"recovery": None if name == "off" else SETTINGS[name]}
        found = [
            engine.generate(prompt_of(t, engine), max_tokens=t.max_tokens, **options) for t in turns
        ]
        return sum(r.stats.decode_s for r in found)

    samples = interleaved({name: (lambda n=name: decode_all(n)) for name in SETTINGS}, pairs)
    return {
        "seconds": {name: spread(found).to_json() for name, found in samples.items()},
        "on_over_off": ratio(samples, "on", "off").to_json(),
    }


def main() -> None:
    """Measure both and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recovery.json"))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rules-only", action="store_true", help="print the table of rules")
    options = parser.parse_args()
    turns = [turn for turn in read_turns(SHIPPED) if turn.kind == "chat"]
    engine = dj.load("tiny", plan=dj.Plan(max_length=1024))
    engine.measures_drafting = False
    engine.warm_up("greedy", "recovery")
    costs = rules(engine, turns, repeats=60)
    print(table(costs), flush=True)
    if options.rules_only:
        return
    report = {
        "rules": costs,
        "turns": len(turns),
        "per_step": machine(engine, turns, repeats=7),
        "whole": whole(engine, turns, options.pairs),
    }
    write_result(options.out, "recovery", report)
    print(json.dumps(report["per_step"], indent=1))
    print(f"decoding, on over off: {report['whole']['on_over_off']['median']:.4f}")


if __name__ == "__main__":
    main()
