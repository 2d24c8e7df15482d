"""Samples taken in turn, A B A B, and what their paired ratios say."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

Samples = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, extremes and quartiles of some numbers."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]

    def __str__(self) -> str:
        first, third = self.quartiles
        return f"{self.median:.3f} [{first:.3f} {third:.3f}] min {self.low:.3f}"

    def to_json(self) -> dict[str, Any]:
        """All figures, and the interquartile range by name."""
        first, third = self.quartiles
        return dataclasses.asdict(self) | {"iqr": third - first}


def spread(numbers: list[float]) -> Spread:
    """The spread of at least two numbers."""
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(statistics.median(numbers), min(numbers), max(numbers), (first, third))


def interleaved(lanes: Mapping[str, Callable[[], float]], pairs: int) -> Samples:
    """Calls every lane in turn, `pairs` times, after one untimed turn."""
    for lane in lanes.values():
        lane()
    samples: Samples = {name: [] for name in lanes}
    for _ in range(pairs):
        for name, lane in lanes.items():
            samples[name].append(lane())
    return samples


def ratio(samples: Samples, over: str, under: str) -> Spread:
    """Spread of the paired ratios of two lanes."""
    return spread([a / b for a, b in zip(samples[over], samples[under], strict=True)])
