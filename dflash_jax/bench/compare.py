"""Equality and speed of speculative against plain decoding, in paired measurements."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Unpack

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingOptions
from dflash_jax.graph import Graph, Pair


@dataclasses.dataclass(frozen=True)
class LosslessCheck:
    """One prompt decoded with and without drafting."""

    prompt: tuple[int, ...]
    speculative: Result
    plain: Result

    @property
    def equal(self) -> bool:
        """Whether both outputs have the same tokens."""
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def first_difference(self) -> int | None:
        """Index of the first output token that differs; None if all are equal."""
        pairs = itertools.zip_longest(self.speculative.token_ids, self.plain.token_ids)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


@dataclasses.dataclass(frozen=True)
class SpeedComparison:
    """Decoding speeds on one prompt in tokens per second, one entry per repeat."""

    check: LosslessCheck
    speculative: list[float]
    plain: list[float]  # plain steps of the engine, whose output is compared
    plain1: list[float]  # one-token steps of the target alone

    @property
    def baseline(self) -> str:
        """The faster form of plain decoding, which the speed-up refers to."""
        return max("plain1", "plain", key=lambda name: statistics.median(getattr(self, name)))

    @property
    def speedup(self) -> float:
        """Median of the paired ratios over the faster form of plain decoding."""
        pairs = zip(self.speculative, getattr(self, self.baseline), strict=True)
        return statistics.median(a / b for a, b in pairs)


def check(
    engine: Engine, prompt: Sequence[int], **options: Unpack[SamplingOptions]
) -> LosslessCheck:
    """Decode with and without drafting; sampled output needs a seed to be comparable."""
    fast = engine.generate(prompt, **options, speculative=True)
    slow = engine.generate(prompt, **options, speculative=False)
    return LosslessCheck(tuple(prompt), fast, slow)


def one_token_engine(engine: Engine) -> Engine:
    """Return an engine of the same target and weights that feeds one token per step."""
    plan = dataclasses.replace(engine.plan, exact=False, plain_width=1)
    params = {"target": engine.params["target"]}
    graph = Graph(Pair(engine.graph.pair.target), plan)
    return Engine(graph, params, tokenizer=engine.tokenizer)


def compare(
    engine: Engine,
    prompt: Sequence[int],
    *,
    repeats: int = 3,
    seconds: float = 1.0,
    **options: Unpack[SamplingOptions],
) -> SpeedComparison:
    """Time speculative, plain and one-token plain decoding in turn.

    Args:
      repeats: minimum number of repeats.
      seconds: minimum duration, because a single short answer is too noisy.
      options: fields of `SamplingParams`.
    """
    single = one_token_engine(engine)
    checked = check(engine, prompt, **options)
    single.generate(prompt, **options)
    comparison = SpeedComparison(checked, speculative=[], plain=[], plain1=[])
    started = time.perf_counter()
    while len(comparison.plain1) < repeats or time.perf_counter() < started + seconds:
        again = check(engine, prompt, **options)
        comparison.speculative.append(again.speculative.stats.tokens_per_s)
        comparison.plain.append(again.plain.stats.tokens_per_s)
        one_token = single.generate(prompt, **options)
        comparison.plain1.append(one_token.stats.tokens_per_s)
    return comparison
