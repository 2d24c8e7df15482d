"""Is speculative output equal to plain output, and how much faster is it? Measured, in pairs."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Unpack

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingOptions


@dataclasses.dataclass(frozen=True)
class Check:
    """One prompt decoded by both lanes of one engine."""

    prompt: tuple[int, ...]
    speculative: Result
    plain: Result

    @property
    def equal(self) -> bool:
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def first_difference(self) -> int | None:
        """Output place of the first token that differs."""
        pairs = zip(self.speculative.token_ids, self.plain.token_ids, strict=False)
        places = [i for i, (a, b) in enumerate(pairs) if a != b]
        if places or self.equal:
            return places[0] if places else None
        return min(len(self.speculative.token_ids), len(self.plain.token_ids))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Decoding speed of the lanes on one prompt, tokens per second, one entry per repeat."""

    check: Check
    speculative: list[float]
    plain: list[float]  # block-wide steps, the lane output is compared with
    plain1: list[float]  # one-token steps of the target alone

    @property
    def baseline(self) -> str:
        """The faster plain lane, which a speed-up is measured against."""
        faster = statistics.median(self.plain1) >= statistics.median(self.plain)
        return "plain1" if faster else "plain"

    @property
    def speedup(self) -> float:
        """Median of the paired ratios over the faster plain lane."""
        slow = self.plain1 if self.baseline == "plain1" else self.plain
        return statistics.median(a / b for a, b in zip(self.speculative, slow, strict=True))


def check(engine: Engine, prompt: Sequence[int], **options: Unpack[SamplingOptions]) -> Check:
    """Decodes greedily with and without drafting."""
    fast = engine.generate(prompt, **options, speculative=True)
    slow = engine.generate(prompt, **options, speculative=False)
    return Check(tuple(prompt), fast, slow)


def one_token_lane(engine: Engine) -> Engine:
    """The same target without drafter, decoding one token per step; shares the weights."""
    plan = dataclasses.replace(engine.plan, exact=False)
    params = {"target": engine.params["target"]}
    return Engine(engine.target, None, params, plan, tokenizer=engine.tokenizer)


def compare(
    engine: Engine,
    prompt: Sequence[int],
    *,
    repeats: int = 3,
    seconds: float = 1.0,
    **options: Unpack[SamplingOptions],
) -> Comparison:
    """Times the three lanes in turn after one untimed round.

    Args:
      repeats: at least so many times,
      seconds: and for at least so long: an answer of a few steps says little by itself.
    """
    single = one_token_lane(engine)
    checked = check(engine, prompt, **options)
    single.generate(prompt, **options)
    speeds: dict[str, list[float]] = {"speculative": [], "plain": [], "plain1": []}
    started = time.perf_counter()
    while len(speeds["plain1"]) < repeats or time.perf_counter() < started + seconds:
        fast = engine.generate(prompt, **options, speculative=True)
        slow = engine.generate(prompt, **options, speculative=False)
        one = single.generate(prompt, **options)
        for name, result in (("speculative", fast), ("plain", slow), ("plain1", one)):
            speeds[name].append(result.stats.tokens_per_s)
    return Comparison(checked, **speeds)
