"""Interleaved samples, A B A B, their paired ratios, and tables of them."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        """Return all figures and the interquartile range."""
        first, third = self.quartiles
        return dataclasses.asdict(self) | {"iqr": third - first}


def spread(numbers: list[float]) -> Spread:
    """Return the spread of at least two numbers."""
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(statistics.median(numbers), min(numbers), max(numbers), (first, third))


def spreads(series: Any) -> Any:
    """Return nested series of numbers, each list replaced by its spread as JSON values."""
    if isinstance(series, list):
        return spread(series).to_json()
    return {name: spreads(inner) for name, inner in series.items()}


def interleaved(calls: Mapping[str, Callable[[], float]], pairs: int) -> Samples:
    """Call every function in turn, `pairs` times, after one untimed call each."""
    for call in calls.values():
        call()
    samples: Samples = {name: [] for name in calls}
    for _ in range(pairs):
        for name, call in calls.items():
            samples[name].append(call())
    return samples


def ratio(samples: Samples, over: str, under: str) -> Spread:
    """Return the spread of the paired ratios of two series."""
    return spread([a / b for a, b in zip(samples[over], samples[under], strict=True)])


def markdown(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown.

    Args:
      headings: the column's names, with " | " between them.
    """
    rule = " | ".join(["---"] * len(headings.split(" | ")))
    lines = [headings, rule, *(" | ".join(map(str, cells)) for cells in rows)]
    return [f"| {line.rstrip()} |" for line in lines]
