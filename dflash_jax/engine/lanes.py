"""Which compiled lane a request needs, the rules its row runs by, and what drafting costs."""

import statistics
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.keys import ProgramKey, Step, Variant
from dflash_jax.decode.inputs import DecodeInputs
from dflash_jax.engine.recovery import OFF
from dflash_jax.engine.request import COLDEST, Request
from dflash_jax.engine.sequence import Live
from dflash_jax.plan import Plan
from dflash_jax.state import CHOICES, DecodeState, RowRules, read_output


def lane_of(request: Request) -> Variant:
    """The lane a request needs; rows share the last of theirs, in which all can run."""
    if request.structured is not None:
        return Variant.CONSTRAINED
    if request.shaped:
        return Variant.PENALIZED
    return Variant.SAMPLED if request.temperature > 0 else Variant.GREEDY


def variants_of(request: Request) -> list[Variant]:
    """The variants whose programs a request needs."""
    found = [lane_of(request)]
    found += [Variant.FORCED_TOKENS] if request.recovery != OFF else []
    return found + ([Variant.PROMPT_LOGPROBS] if request.scored else [])


def make_rules(
    plan: Plan,
    rows: Sequence[Live | None],
    ready: Container[int],
    there: dict[str, tuple[np.ndarray, jax.Array]],
) -> RowRules:
    """Per-row rules for the device; rows that are not ready are frozen by limit 0.

    Args:
      there: columns that are on the device already, by name; brought up to date.
    """
    stop = np.full((len(rows), plan.stop_slots), -1, np.int32)
    limit, drafts, top_k = np.zeros((3, len(rows)), np.int32)
    temperature, min_p = np.zeros((2, len(rows)), np.float32)
    top_p = np.ones((len(rows),), np.float32)
    seed = np.zeros((len(rows),), np.uint32)
    choices = np.full((len(rows), CHOICES), -1, np.int32)
    opening = np.full((len(rows),), -1, np.int32)
    for row, live in enumerate(rows):
        if live is None:
            continue
        request = live.request
        stop[row, : len(request.stop_ids)] = sorted(request.stop_ids)
        limit[row] = live.limit if row in ready else 0
        drafts[row] = (request.block_size or plan.block) - 1 if live.speculates else 0
        if request.temperature > 0:
            temperature[row] = max(request.temperature, COLDEST)
        choices[row, : len(live.choices)] = live.choices
        opening[row] = live.opening
        top_p[row] = request.top_p
        min_p[row], top_k[row], seed[row] = request.min_p, request.top_k, request.seed
    columns: dict[str, Any] = {
        "stop_ids": stop,
        "limit": limit,
        "max_drafts": drafts,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "choices": choices,
    }
    if plan.call_odds:
        columns["opening"] = opening
    for name, column in columns.items():
        if name not in there or not np.array_equal(there[name][0], column):
            there[name] = column, jax.device_put(column)
    return RowRules(**{name: there[name][1] for name in columns})


def break_even(
    run: Mapping[ProgramKey, Callable[..., Any]],
    params: Any,
    state: DecodeState,
    rules: RowRules,
    *,
    repeats: bool,
    samples: int = 5,
) -> tuple[DecodeState, float]:
    """Tokens a drafted round must decide to be worth its time: its time over a plain step's.

    Every row stands still meanwhile.

    Args:
      repeats: whether the programs make several steps in a call; they are told to make one.
    """
    inputs = DecodeInputs(rules, num_steps=np.int32(0) if repeats else None)
    times: dict[Step, list[float]] = {Step.SPECULATIVE: [], Step.PLAIN: []}
    for _ in range(samples + 1):
        for name, found in times.items():
            started = time.perf_counter()
            state, _, output = run[ProgramKey(name, Variant.GREEDY)](params, state, None, inputs)
            read_output(output)
            found.append(time.perf_counter() - started)
    medians = [statistics.median(found[1:]) for found in times.values()]
    return state, medians[0] / medians[1]
