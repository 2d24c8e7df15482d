"""Compare two forms of one model: are their differences within the error of their types?"""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dflash_jax.config import family_of
from dflash_jax.converters import compare_tokens
from dflash_jax.converters.canonical import Canonical
from dflash_jax.converters.gguf.tensors import half_split_rows
from dflash_jax.converters.models import StoredModel
from dflash_jax.converters.source import as_rows

# Recognise known transforms in the difference of two tensors.


MAX_WEIGHTS = 1 << 26


def guess(first: np.ndarray, second: np.ndarray, head_dim: int, limit: float) -> str:
    """Return the transform that makes the tensors equal within `limit` relative RMS, or ""."""
    if first.size > MAX_WEIGHTS:
        return ""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norm = float(np.linalg.norm(a)) or 1.0
    for name, changed in _candidates(a, b, head_dim):
        if np.linalg.norm(a - changed) / norm <= limit:
            return name
    return ""


def _candidates(a: np.ndarray, b: np.ndarray, head_dim: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "the second has 1 added", b - 1
    yield "the second lacks 1", b + 1
    yield "the sign is turned", -b
    if b.ndim == 2 and b.shape[0] == b.shape[1]:
        yield "the second is transposed", b.T
    rows = as_rows(b)
    if len(rows) % head_dim == 0:
        order = half_split_rows(len(rows) // head_dim, head_dim)
        yield "the second pairs neighbours for rotation", rows[order].reshape(b.shape)
        yield "the first pairs neighbours for rotation", rows[np.argsort(order)].reshape(b.shape)
    power = float(np.vdot(b, b))
    if power:
        factor = float(np.vdot(a, b)) / power
        yield f"the first is the second times {factor:.6g}", b * factor


# The error that a stored type may have, as relative RMS.
#
# Measured by quantising matrices of different distributions; IQ1, IQ2 and IQ3 by ggml's own code,
# with equal and with log-normal importances. An error above `fail` is damage; above twice `fail` it
# is a wrong transform.


@dataclass(frozen=True)
class Limits:
    """Relative RMS up to `warn` is usual; above `fail` it is not caused by the type."""

    warn: float
    fail: float

    @property
    def row(self) -> float:
        """The error of one row of a matrix above which it is not caused by the type."""
        return min(ROW_FACTOR * self.fail, MOST_OF_ROW)

    def shifted(self, offset: float) -> "Limits":
        """Return the limits after a conversion that subtracts something from stored values.

        Args:
          offset: the size of what is subtracted, relative to the result.
        """
        rounding = offset * ROUNDING
        return Limits(*(limit * (1 + offset) + rounding for limit in (self.warn, self.fail)))


EXACT = Limits(0.0, 1e-7)
ROW_FACTOR = 2.5  # of a row's limit over a tensor's; real rows stay below
MOST_OF_ROW = 1.6  # a row that is negated has 2, whatever its type
SMALL_ROW = 0.25  # of a typical row: rows with less are judged as if they had this much
ROUNDING = 2.0**-23  # of float32, for a sum and its inverse
UNUSABLE = 0.5  # error from which a model that was not trained for the type answers nonsense
LIMITS = {
    "F64": EXACT,
    "F32": EXACT,
    "F16": Limits(0.0003, 0.0005),
    "BF16": Limits(0.0018, 0.003),
    "Q8_0": Limits(0.008, 0.012),
    "Q6_K": Limits(0.024, 0.032),
    "F8_E4M3": Limits(0.03, 0.04),
    "I8": Limits(0.024, 0.04),
    "INT8": Limits(0.024, 0.04),
    "F8_E5M2": Limits(0.06, 0.08),
    "INT6": Limits(0.045, 0.065),  # of MLX, for groups of 128
    "INT5": Limits(0.09, 0.13),
    "Q5_K": Limits(0.048, 0.065),
    "Q5_1": Limits(0.05, 0.07),
    "Q5_0": Limits(0.062, 0.085),
    "Q4_K": Limits(0.095, 0.13),
    "IQ4_NL": Limits(0.10, 0.14),
    "IQ4_XS": Limits(0.10, 0.14),
    "Q4_1": Limits(0.10, 0.14),
    "Q4_0": Limits(0.125, 0.17),
    "MXFP4": Limits(0.14, 0.18),
    "U8": Limits(0.14, 0.18),  # MXFP4 as gpt-oss stores it
    "NVFP4": Limits(0.14, 0.18),
    "INT4": Limits(0.18, 0.25),  # of AWQ, GPTQ and compressed-tensors, for groups of 128
    "Q3_K": Limits(0.20, 0.27),
    "IQ3_S": Limits(0.22, 0.30),
    "IQ3_XXS": Limits(0.22, 0.30),
    "INT3": Limits(0.37, 0.50),
    "Q2_K": Limits(0.38, 0.50),
    "IQ2_S": Limits(0.45, 0.60),
    "IQ2_XS": Limits(0.45, 0.60),
    "IQ2_XXS": Limits(0.45, 0.60),
    "IQ1_M": Limits(0.60, 0.80),
    "INT2": Limits(0.68, 0.90),
    "IQ1_S": Limits(0.65, 0.85),
    # For weights that were not trained to have these values:
    "Q1_0": Limits(0.80, 1.05),
    "Q2_0": Limits(0.80, 1.05),
    "TQ1_0": Limits(0.90, 1.20),
    "TQ2_0": Limits(0.90, 1.20),
}


def between(first: str, second: str) -> Limits:
    """Return the limits for two forms of the same weights: the coarser type's.

    The errors of two coarse types add up in the worst case.
    """
    found = [LIMITS.get(kind, EXACT) for kind in (first, second)]
    coarse, fine = sorted(found, key=lambda limits: -limits.fail)
    return Limits(coarse.warn + fine.warn, coarse.fail + fine.fail)


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
    row_rms: float = 0.0  # of the row of a matrix with the largest error
    row: int = 0  # its number
    hint: str = ""  # a transform that would explain the difference

    @property
    def wrong_row(self) -> str:
        """The row of which the type does not explain the error, in words; empty if none."""
        if self.row_rms <= self.limits.row:
            return ""
        percent, limit = _percent(self.row_rms).strip(), _percent(self.limits.row).strip()
        return f"row {self.row} of {math.prod(self.shape[:-1])}: {percent}, limit {limit}"


@dataclass(frozen=True)
class ModelComparison:
    """Differences, worst first, and tensors that only one of the two models has."""

    tensors: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: tuple[str, ...]  # tensors whose shapes differ
    configs: tuple[str, ...]  # fields that differ
    tokens: tuple[str, ...] = ()  # what differs in tokenizers, special ids and chat templates
    notes: tuple[str, ...] = ()  # what was not compared

    @property
    def agree(self) -> bool:
        """Whether the two are the same model within the error of their types."""
        wrong = (self.only_first, self.only_second, self.shapes, self.configs, self.tokens)
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
_INCIDENTAL = frozenset({"dtype", "max_length", "num_target_layers"})
_INCIDENTAL |= {"eos_token_ids", "bos_token_id", "pad_token_id"}  # not in files without a tokenizer


def compare(
    first: StoredModel,
    second: StoredModel,
    *,
    progress: Callable[[str, int], object] = lambda name, weights: None,
) -> ModelComparison:
    """Compare inventories, configurations, tokenizers and every tensor that both models have.

    Args:
      progress: called with the name and the size of each tensor that was compared.

    Raises:
      CheckpointError: files of a model are damaged.
    """
    tokens, notes = compare_tokens.differences(first, second)
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
    found.sort(key=_least_harm)
    return ModelComparison(
        tensors=tuple(found),
        only_first=tuple(sorted(ours - theirs)),
        only_second=tuple(sorted(theirs - ours)),
        shapes=tuple(
            f"{n}: {list(first.tensors.shape(n))} against {list(second.tensors.shape(n))}"
            for n in unequal
        ),
        configs=_config_differences(first, second),
        tokens=tuple(tokens),
        notes=tuple(notes),
    )


def _least_harm(d: Difference) -> tuple[bool, float]:
    """Return a key that orders differences, worst first: damaged values, then by the limits."""
    limits = d.limits
    over = max(d.rms / max(limits.fail, 1e-12), d.row_rms / max(limits.row, 1e-12))
    return d.not_finite == 0, -over


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
    errors, powers = np.zeros(rows), np.zeros(rows)  # sums of squares of each row
    other = product = 0.0
    largest = peak = 0.0
    bad = 0
    for start in range(0, rows, step):
        chosen = slice(start, min(start + step, rows))
        with np.errstate(invalid="ignore"):  # signalling NaNs
            a = first.read_rows(name, chosen).astype(np.float64).reshape(-1, width)
            b = second.read_rows(name, chosen).astype(np.float64).reshape(-1, width)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            bad += int((~finite).sum())
            a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        delta = a - b
        errors[chosen] = np.einsum("ij,ij->i", delta, delta)
        powers[chosen] = np.einsum("ij,ij->i", a, a)
        other += float(np.vdot(b, b))
        product += float(np.vdot(a, b))
        largest = max(largest, float(np.abs(delta).max(initial=0.0)))
        peak = max(peak, float(np.abs(a).max(initial=0.0)))
    error, power = float(errors.sum()), float(powers.sum())
    rms = math.sqrt(error / power) if power else math.sqrt(error)
    cosine = product / math.sqrt(power * other) if power and other else float(power == other)
    limits = between(*kinds)
    if offset := max(first.offset(name), second.offset(name)):
        limits = limits.shifted(offset / max(math.sqrt(power / math.prod(shape)), 1e-12))
    worst = _worst_row(errors, powers) if len(shape) > 1 and power else (0, 0.0)
    found = Difference(
        name=name,
        kinds=kinds,
        shape=shape,
        rms=rms,
        largest=largest / peak if peak else largest,
        cosine=cosine,
        not_finite=bad,
        limits=limits,
        verdict=_verdict(rms, limits, bad),
        row=worst[0],
        row_rms=worst[1],
    )
    judged = FAIL if found.wrong_row and found.verdict in (OK, WARN) else found.verdict
    return replace(found, verdict=judged)


def _worst_row(errors: np.ndarray, powers: np.ndarray) -> tuple[int, float]:
    """Return the row with the largest error, and that error relative to the row.

    Smaller rows than usual, of tokens that were never seen for example, count as if they were
    larger: types whose scales are shared lose them.
    """
    least = SMALL_ROW**2 * float(powers.mean())
    shares = errors / np.maximum(powers, least)
    row = int(shares.argmax())
    return row, math.sqrt(shares[row])


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
    listed += [f"tokenizers differ: {line}" for line in found.tokens]
    listed += found.notes
    for d in found.tensors[:worst]:
        kinds = "/".join(d.kinds)
        listed.append(
            f"{d.verdict:9} {_percent(d.rms)} (limit {_percent(d.limits.fail).strip()})"
            f" cos {d.cosine:.6f}"
            f" max {d.largest:8.3%} {kinds:12} {d.name}"
            + (f" {d.not_finite} values not finite" if d.not_finite else "")
            + (f" ({d.hint})" if d.hint else "")
            + (f" ({d.wrong_row})" if d.wrong_row else "")
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
