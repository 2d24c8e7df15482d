"""Compare two forms of one model: are their differences within the error of their types?"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dflash_jax.config import family_of
from dflash_jax.converters.canonical import Canonical
from dflash_jax.converters.expected_error import UNUSABLE, Limits, between
from dflash_jax.converters.models import StoredModel
from dflash_jax.converters.transforms import guess

CHUNK = 1 << 22  # weights compared at a time
OK, WARN, FAIL, TRANSFORM = "ok", "warn", "fail", "transform"


@dataclass(frozen=True)
class Difference:
    """The comparison of one tensor. Errors are relative to the first model."""

    name: str
    kinds: tuple[str, str]
    shape: tuple[int, ...]
    rms: float
    largest: float  # |a - b| over the largest |a|
    cosine: float
    not_finite: int
    limits: Limits
    verdict: str
    hint: str = ""  # a transform that would explain the difference


@dataclass(frozen=True)
class ModelComparison:
    """Differences, worst first, and tensors that only one of the two models has."""

    tensors: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: tuple[str, ...]  # tensors whose shapes differ
    configs: tuple[str, ...]  # fields that differ

    @property
    def agree(self) -> bool:
        """Whether the two are the same model within the error of their types."""
        wrong = (self.only_first, self.only_second, self.shapes, self.configs)
        return not any(wrong) and all(d.verdict in (OK, WARN) for d in self.tensors)

    @property
    def unusable(self) -> tuple[str, ...]:
        """Pairs of types whose allowed errors are as large as the weights themselves."""
        return tuple(kinds for kinds, errors in self.errors().items() if _mean(errors) > UNUSABLE)

    def errors(self) -> dict[str, list[float]]:
        """Return the errors of tensors by their pair of types."""
        found: dict[str, list[float]] = {}
        for d in sorted(self.tensors, key=lambda d: d.kinds):
            found.setdefault("/".join(d.kinds), []).append(d.rms)
        return found

    @property
    def outcome(self) -> str:
        """The result in words."""
        if not self.agree:
            return "NOT the same model within these limits"
        if self.unusable:
            return (
                f"the same weights within the error that {', '.join(self.unusable)} allows; at that"
                " error a model is likely unusable unless it was trained for the type"
            )
        return "the same model"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return asdict(self) | {"agree": self.agree, "outcome": self.outcome}


# Config fields that may differ between layouts of the same model.
_INCIDENTAL = frozenset({"dtype", "eos_token_ids", "max_length", "num_target_layers"})


def compare(
    first: StoredModel,
    second: StoredModel,
    *,
    progress: Callable[[str, int], object] = lambda name, weights: None,
) -> ModelComparison:
    """Compare inventories, configurations and every tensor that both models have.

    Args:
      progress: called with the name and the size of each tensor that was compared.
    """
    ours, theirs = set(first.tensors.names()), set(second.tensors.names())
    both = [name for name in first.tensors.names() if name in theirs]
    unequal = [n for n in both if first.tensors.shape(n) != second.tensors.shape(n)]
    same = [n for n in both if n not in set(unequal)]

    def compared(name: str) -> Difference:
        found = difference(name, first.tensors, second.tensors)
        progress(name, math.prod(first.tensors.shape(name)))
        return found

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        found = list(pool.map(compared, same))
    head = first.config.head_dim
    found = [_explained(d, first.tensors, second.tensors, head) for d in found]
    found.sort(key=lambda d: (d.not_finite == 0, -d.rms / max(d.limits.fail, 1e-12)))
    return ModelComparison(
        tensors=tuple(found),
        only_first=tuple(sorted(ours - theirs)),
        only_second=tuple(sorted(theirs - ours)),
        shapes=tuple(
            f"{n}: {list(first.tensors.shape(n))} against {list(second.tensors.shape(n))}"
            for n in unequal
        ),
        configs=_config_differences(first, second),
    )


def _explained(found: Difference, first: Canonical, second: Canonical, head_dim: int) -> Difference:
    if found.verdict != TRANSFORM or found.not_finite:
        return found
    tensors = first.read(found.name), second.read(found.name)
    return replace(found, hint=guess(*tensors, head_dim, max(found.limits.fail, 1e-6)))


def _config_differences(first: StoredModel, second: StoredModel) -> tuple[str, ...]:
    a, b = first.config.to_json(), second.config.to_json()
    if first.role != second.role:
        return (f"a {first.role} against a {second.role}",)
    for fields in (a, b):
        if kind := fields.get("model_type"):
            fields["model_type"] = family_of(kind)  # types of a family differ in other fields too
    keys = [k for k in a if a[k] != b.get(k) and k not in _INCIDENTAL]
    return tuple(f"{k}: {a[k]} against {b.get(k)}" for k in keys)


def difference(name: str, first: Canonical, second: Canonical) -> Difference:
    """Compare one tensor chunk by chunk, with sums in float64."""
    shape, kinds = first.shape(name), (first.kind(name), second.kind(name))
    width = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(width, 1)
    step = max(1, CHUNK // max(width, 1))
    error = power = other = product = 0.0
    largest = peak = 0.0
    bad = 0
    for start in range(0, rows, step):
        chosen = slice(start, min(start + step, rows))
        with np.errstate(invalid="ignore"):  # signalling NaNs
            a = first.read_rows(name, chosen).astype(np.float64)
            b = second.read_rows(name, chosen).astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            bad += int((~finite).sum())
            a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        delta = a - b
        error += float(np.vdot(delta, delta))
        power, other = power + float(np.vdot(a, a)), other + float(np.vdot(b, b))
        product += float(np.vdot(a, b))
        largest = max(largest, float(np.abs(delta).max(initial=0.0)))
        peak = max(peak, float(np.abs(a).max(initial=0.0)))
    rms = math.sqrt(error / power) if power else math.sqrt(error)
    cosine = product / math.sqrt(power * other) if power and other else float(power == other)
    limits = between(*kinds)
    if offset := max(first.offset(name), second.offset(name)):
        limits = limits.shifted(offset / max(math.sqrt(power / math.prod(shape)), 1e-12))
    verdict = _verdict(rms, limits, bad)
    return Difference(
        name, kinds, shape, rms, largest / peak if peak else largest, cosine, bad, limits, verdict
    )


def _verdict(rms: float, limits: Limits, not_finite: int) -> str:
    if not_finite or rms > limits.fail:
        return TRANSFORM if rms > max(2 * limits.fail, 0.02) else FAIL
    return WARN if rms > limits.warn else OK


def lines(found: ModelComparison, worst: int) -> list[str]:
    """Return the comparison as text: problems, then the worst tensors, then a summary."""
    listed = [f"only in the first: {name}" for name in found.only_first]
    listed += [f"only in the second: {name}" for name in found.only_second]
    listed += [f"shapes differ: {line}" for line in found.shapes]
    listed += [f"configurations differ: {line}" for line in found.configs]
    for d in found.tensors[:worst]:
        kinds = "/".join(d.kinds)
        listed.append(
            f"{d.verdict:9} {_percent(d.rms)} (limit {_percent(d.limits.fail).strip()})"
            f" cos {d.cosine:.6f}"
            f" max {d.largest:8.3%} {kinds:12} {d.name}"
            + (f" {d.not_finite} values not finite" if d.not_finite else "")
            + (f" ({d.hint})" if d.hint else "")
        )
    for kinds, errors in found.errors().items():
        mean, largest = _percent(_mean(errors)).strip(), _percent(max(errors)).strip()
        listed.append(f"{kinds}: {len(errors)} tensors, mean {mean}, max {largest}")
    return [*listed, found.outcome]


def _mean(errors: list[float]) -> float:
    return sum(errors) / len(errors)


def _percent(share: float) -> str:
    """Return a share in per cent, with an exponent where three decimals would show zero."""
    return f"{share:9.3%}" if share == 0 or share >= 1e-5 else f"{100 * share:8.1e}%"
