"""Compare two forms of one model: are their differences within the error of their types?"""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dflash_jax.converters import compare_tokens
from dflash_jax.converters.error_limits import SMALL_ROW, UNUSABLE, Limits, between
from dflash_jax.converters.formats.canonical import Canonical
from dflash_jax.converters.formats.gguf.tensors import half_split_rows
from dflash_jax.converters.formats.source import as_rows
from dflash_jax.converters.models import StoredModel
from dflash_jax.families import family_of

MAX_WEIGHTS = 1 << 26


def guess(first: np.ndarray, second: np.ndarray, head_dim: int, limit: float) -> str:
    """Return the transform that makes the tensors equal within `limit` relative RMS, or ""."""
    if first.size > MAX_WEIGHTS:
        return ""
    a = first.astype(np.float64)
    b = second.astype(np.float64)
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


CHUNK = 1 << 22  # weights compared at a time
OK = "ok"
WARN = "warn"
FAIL = "fail"
TRANSFORM = "transform"


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
    row_rms: float = 0.0  # error of the row with the largest one, in a matrix
    row: int = 0  # number of that row
    hint: str = ""  # a transform that would explain the difference

    @property
    def wrong_row(self) -> str:
        """The row whose error the type does not explain, in words; empty if there is none."""
        if self.row_rms <= self.limits.row:
            return ""
        percent = _percent(self.row_rms).strip()
        limit = _percent(self.limits.row).strip()
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
        errors: dict[str, list[float]] = {}
        for d in sorted(self.tensors, key=lambda d: d.kinds):
            errors.setdefault("/".join(d.kinds), []).append(d.rms)
        return errors

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
    ours = set(first.tensors.names())
    theirs = set(second.tensors.names())
    both = [name for name in first.tensors.names() if name in theirs]
    unequal = [n for n in both if first.tensors.shape(n) != second.tensors.shape(n)]
    same = [n for n in both if n not in set(unequal)]

    def compared(name: str) -> Difference:
        result = difference(name, first.tensors, second.tensors)
        progress(name, math.prod(first.tensors.shape(name)))
        return result

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        unexplained = list(pool.map(compared, same))
    head = first.config.head_dim
    tensors = [_explained(d, first.tensors, second.tensors, head) for d in unexplained]
    tensors.sort(key=_least_harm)
    return ModelComparison(
        tensors=tuple(tensors),
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


def _explained(d: Difference, first: Canonical, second: Canonical, head_dim: int) -> Difference:
    """Return a difference with the transform that explains it, if there is one."""
    if d.verdict != TRANSFORM or d.not_finite:
        return d
    one = first.read(d.name)
    other = second.read(d.name)
    return replace(d, hint=guess(one, other, head_dim, max(d.limits.fail, 1e-6)))


def _config_differences(first: StoredModel, second: StoredModel) -> tuple[str, ...]:
    a = first.config.to_json()
    b = second.config.to_json()
    if first.role != second.role:
        return (f"a {first.role} against a {second.role}",)
    for fields in (a, b):
        if kind := fields.get("model_type"):
            fields["model_type"] = family_of(kind)  # types of a family differ in other fields too
    keys = [k for k in a if a[k] != b.get(k) and k not in _INCIDENTAL]
    return tuple(f"{k}: {a[k]} against {b.get(k)}" for k in keys)


def difference(name: str, first: Canonical, second: Canonical) -> Difference:
    """Compare one tensor chunk by chunk, with sums in float64."""
    shape = first.shape(name)
    kinds = (first.kind(name), second.kind(name))
    width = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(width, 1)
    step = max(1, CHUNK // max(width, 1))
    # Sums of squares of each row.
    errors = np.zeros(rows)
    powers = np.zeros(rows)
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
            a = np.where(finite, a, 0.0)
            b = np.where(finite, b, 0.0)
        delta = a - b
        errors[chosen] = np.einsum("ij,ij->i", delta, delta)
        powers[chosen] = np.einsum("ij,ij->i", a, a)
        other += float(np.vdot(b, b))
        product += float(np.vdot(a, b))
        largest = max(largest, float(np.abs(delta).max(initial=0.0)))
        peak = max(peak, float(np.abs(a).max(initial=0.0)))
    error = float(errors.sum())
    power = float(powers.sum())
    rms = math.sqrt(error / power) if power else math.sqrt(error)
    cosine = product / math.sqrt(power * other) if power and other else float(power == other)
    limits = between(*kinds)
    if offset := max(first.offset(name), second.offset(name)):
        limits = limits.shifted(offset / max(math.sqrt(power / math.prod(shape)), 1e-12))
    worst_row = 0
    worst_error = 0.0
    if len(shape) > 1 and power:
        worst_row, worst_error = _worst_row(errors, powers)
    result = Difference(
        name=name,
        kinds=kinds,
        shape=shape,
        rms=rms,
        largest=largest / peak if peak else largest,
        cosine=cosine,
        not_finite=bad,
        limits=limits,
        verdict=_verdict(rms, limits, bad),
        row=worst_row,
        row_rms=worst_error,
    )
    if result.wrong_row and result.verdict in (OK, WARN):
        return replace(result, verdict=FAIL)
    return result


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


def lines(comparison: ModelComparison, worst: int) -> list[str]:
    """Return the comparison as text: problems, then the `worst` tensors, then a summary."""
    listed = [f"only in the first: {name}" for name in comparison.only_first]
    listed += [f"only in the second: {name}" for name in comparison.only_second]
    listed += [f"shapes differ: {line}" for line in comparison.shapes]
    listed += [f"configurations differ: {line}" for line in comparison.configs]
    listed += [f"tokenizers differ: {line}" for line in comparison.tokens]
    listed += comparison.notes
    for d in comparison.tensors[:worst]:
        kinds = "/".join(d.kinds)
        listed.append(
            f"{d.verdict:9} {_percent(d.rms)} (limit {_percent(d.limits.fail).strip()})"
            f" cos {d.cosine:.6f}"
            f" max {d.largest:8.3%} {kinds:12} {d.name}"
            + (f" {d.not_finite} values not finite" if d.not_finite else "")
            + (f" ({d.hint})" if d.hint else "")
            + (f" ({d.wrong_row})" if d.wrong_row else "")
        )
    for kinds, errors in comparison.errors().items():
        mean = _percent(_mean(errors)).strip()
        largest = _percent(max(errors)).strip()
        listed.append(f"{kinds}: {len(errors)} tensors, mean {mean}, max {largest}")
    return [*listed, comparison.outcome]


def _mean(errors: list[float]) -> float:
    return sum(errors) / len(errors)


def _percent(share: float) -> str:
    """Return a share in per cent, with an exponent where three decimals would show zero."""
    return f"{share:9.3%}" if share == 0 or share >= 1e-5 else f"{100 * share:8.1e}%"
