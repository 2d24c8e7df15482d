"""Acceptance of an engine's drafts by position, kind of prompt and length of context.

Rounds of one answer resemble each other, so intervals come from drawing whole prompts again.
"""

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from jaxtyping import Float, Int

from dflash_jax.engine.break_even import BreakEven
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingOptions
from dflash_jax.errors import RequestError, install_hint
from dflash_jax.trainer import data
from dflash_jax.trainer.evaluate import prompt_ids
from dflash_jax.utils.sources import Source

# Intervals hold LEVEL of the figures of DRAWS samples of prompts, drawn by SEED.
DRAWS = 2000
LEVEL = 0.95
SEED = 0
SHORTEST = 128  # contexts of the first class have fewer tokens; each class is twice as long
TOKENS = 128  # most tokens of an answer


class Estimate(NamedTuple):
    """A mean and the bounds of its 95 % interval.

    The mean is None where nothing was seen, the bounds where there are fewer than two prompts.
    """

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        if self.low is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclasses.dataclass(frozen=True)
class AcceptanceFigures:
    """Figures of the drafts that were accepted in some rounds.

    Attributes:
      prompts, rounds: how many prompts and rounds there were.
      length: tokens of a round, the bonus token included (τ).
      positions: share of the drafts at each position that were accepted, of those verified there;
        a draft counts as accepted if all before it were, too.
    """

    prompts: int
    rounds: int
    length: Estimate
    positions: tuple[Estimate, ...]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Result of `dj.measure`; it prints as a table.

    Attributes:
      total: figures of all rounds.
      kinds: figures by kind of prompt.
      contexts: figures by the number of tokens before the round, such as "128-255".
    """

    total: AcceptanceFigures
    kinds: dict[str, AcceptanceFigures]
    contexts: dict[str, AcceptanceFigures]

    def __str__(self) -> str:
        rows = [("all", self.total), *self.kinds.items()]
        rows += [(f"context {name}", figures) for name, figures in self.contexts.items()]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}  prompts  rounds  tokens per round     accepted by position"]
        for name, figures in rows:
            shares = " ".join(str(x._replace(low=None)) for x in figures.positions)
            counts = f"{figures.prompts:>7}  {figures.rounds:>6}"
            lines.append(f"{name:{width}}  {counts}  {figures.length!s:<19}  {shares}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return dataclasses.asdict(self, dict_factory=_plain)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return a matplotlib figure with intervals, and write it to a file if one is named.

        Raises:
          RequestError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise RequestError(f"a plot needs {error.name}; {install_hint('plot')}") from error
        figure = Figure(figsize=(10, 3.4), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(2, 1, 1))
        for name, figures in (self.kinds or {"all": self.total}).items():
            values, low, high = _arrays(figures.positions)
            places = np.arange(1, len(values) + 1)
            label = f"{name}, τ = {figures.length._replace(low=None)}"
            left.plot(places, values, marker="o", label=label)
            left.fill_between(places, low, high, alpha=0.2)
        left.set(xlabel="position of the draft", ylabel="share accepted", ylim=(0, 1))
        left.legend()
        for axis, label, rows in (
            (middle, "kind of prompt", self.kinds),
            (right, "tokens of context", self.contexts),
        ):
            values, low, high = _arrays([figures.length for figures in rows.values()])
            errors = np.maximum([values - low, high - values], 0)
            axis.errorbar([*rows], values, errors, fmt="o", capsize=4)
            axis.set(xlabel=label, ylabel="tokens per round (τ)")
            axis.tick_params(axis="x", rotation=30)
            axis.margins(x=0.3)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def measure(
    engine: Engine,
    prompts: Source | Iterable[Any] | Mapping[str, Iterable[Any]],
    **options: Unpack[SamplingOptions],
) -> Measurement:
    """Answer prompts with whole blocks of drafts, and return which drafts were accepted.

    Args:
      engine: an engine with a drafter. What it measured about drafting is set aside meanwhile.
      prompts: user turns, conversations, lists of token ids, or dicts like the lines of
        `dflash-jax train --data`; a file of such lines; or lists of them by kind. By default the
        kinds are chat, code (of texts) and ids.
      options: fields of `dj.SamplingParams`; answers have 128 tokens at most by default.

    Raises:
      ConfigError: a prompt has none of the known forms.
      RequestError: there are no prompts, nothing is drafted, or a prompt cannot be served.
    """
    if not isinstance(engine, Engine):
        raise RequestError(f"engine is a {type(engine).__name__}; expected one of `dj.load`")
    if engine.graph.pair.drafter is None or options.get("speculative") is False:
        raise RequestError("nothing is drafted; expected an engine with a drafter, and drafting")
    kinds = by_kind(prompts)
    asked: list[tuple[str, list[int]]] = []
    for kind, entries in kinds.items():
        asked += [(kind, prompt_ids(engine, entry)) for entry in entries]
    if not asked:
        raise RequestError(f"prompts is {prompts!r}; expected some prompts")
    traced: SamplingOptions = {"max_tokens": TOKENS}
    traced = {**traced, **options, "trace": True}
    meter = engine.core.meter
    known = meter.value
    enabled = meter.enabled
    try:
        meter.enabled = False
        meter.value = BreakEven()
        results = engine.generate_many([ids for _, ids in asked], **traced)
    finally:
        meter.value = known
        meter.enabled = enabled
    return measurement([kind for kind, _ in asked], results, engine.plan.block - 1)


def by_kind(prompts: Any) -> dict[str, list[dict[str, Any]]]:
    """Return prompts as lines of held-out prompts, by kind.

    Raises:
      ConfigError, RequestError: as for `measure`.
    """
    if isinstance(prompts, str | os.PathLike):
        examples = data.read(Path(prompts))
    elif isinstance(prompts, Mapping):
        chosen = {}
        for kind, every in prompts.items():
            chosen[str(kind)] = [*itertools.chain.from_iterable(by_kind(every).values())]
        return chosen
    elif isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; expected a list, a file, or lists by kind")
    else:
        examples = [data.example(data.line(x), f"prompt {i}") for i, x in enumerate(prompts)]
    entries: dict[str, list[dict[str, Any]]] = {}
    for example in examples:
        entry = example.entry()
        entries.setdefault(entry["kind"], []).append(entry)
    return entries


class DraftedRound(NamedTuple):
    """A round that drafted: its prompt, the tokens before it, and what became of its drafts."""

    prompt: int
    context: int
    tokens: int
    verified: int
    accepted: int


def measurement(kinds: Sequence[str], results: Sequence[Result], places: int) -> Measurement:
    """Return the figures of traced answers.

    Args:
      kinds: the kind of each prompt.
      places: drafts of a block.
    """
    drafted: list[DraftedRound] = []
    for i, result in enumerate(results):
        drafted += _rounds(i, result)
    rounds = np.array(drafted, int).reshape(-1, len(DraftedRound._fields))
    kind_of = np.array([*kinds])[rounds[:, 0]] if len(rounds) else np.array([], str)
    # 0 for contexts below `SHORTEST`, 1 below twice as many, and so on.
    classes = np.ceil(np.log2(np.maximum((rounds[:, 1] + 1) / SHORTEST, 1))).astype(int)
    contexts = {}
    for number in np.unique(classes):
        start = SHORTEST << (number - 1) if number else 0
        name = f"{start}-{(SHORTEST << number) - 1}"
        contexts[name] = acceptance(rounds[classes == number], places)
    return Measurement(
        acceptance(rounds, places),
        {kind: acceptance(rounds[kind_of == kind], places) for kind in dict.fromkeys(kinds)},
        contexts,
    )


def _rounds(prompt: int, result: Result) -> list[DraftedRound]:
    rounds = []
    context = result.stats.prompt_tokens
    for part in result.trace:
        if part.proposed and part.tokens:
            kept = len(part.tokens)
            rounds.append(DraftedRound(prompt, context, kept, part.proposed, part.accepted))
        context += len(part.tokens)
    return rounds


def acceptance(rounds: Int[np.ndarray, "R 5"], places: int) -> AcceptanceFigures:
    """Return the figures of some rounds, whose columns are those of `DraftedRound`."""
    prompts, index = np.unique(rounds[:, 0], return_inverse=True)
    _, _, tokens, verified, accepted = rounds.T
    sums = np.zeros((len(prompts), 2 * places + 2))
    columns = [tokens, np.ones_like(tokens)]
    for place in range(1, places + 1):
        columns.append((accepted >= place).astype(int))
        columns.append((verified >= place).astype(int))
    np.add.at(sums, index, np.stack(columns, axis=1))
    length, *shares = estimates(sums)
    return AcceptanceFigures(len(prompts), len(rounds), length, tuple(shares))


def estimates(sums: Float[np.ndarray, "P N"]) -> list[Estimate]:
    """Return ratios of sums over prompts with intervals: of column 0 to 1, of 2 to 3, and so on."""
    total = sums.sum(axis=0)
    values = _ratios(total[None])[0]
    count = len(sums)
    if count < 2:
        return [Estimate(_known(x), None, None) for x in values]
    draws = np.random.default_rng(SEED).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    tail = 50 * (1 - LEVEL)
    drawn = _ratios(draws @ sums)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a position that was never verified
        low, high = np.nanpercentile(drawn, [tail, 100 - tail], axis=0)
    return [Estimate(*map(_known, x)) for x in zip(values, low, high, strict=True)]


def _ratios(sums: Float[np.ndarray, "M N"]) -> Float[np.ndarray, "M N/2"]:
    """Return ratios of neighbouring columns, not a number where nothing was counted."""
    counts = sums[:, 1::2]
    return np.where(counts > 0, sums[:, 0::2] / np.maximum(counts, 1), np.nan)


def _known(x: float) -> float | None:
    return None if np.isnan(x) else float(x)


def _arrays(estimates: Sequence[Estimate]) -> Float[np.ndarray, "3 N"]:
    """Return values and bounds; bounds that are not known are the values."""
    rows = [[x.value, x.value if x.low is None else x.low,
             x.value if x.high is None else x.high] for x in estimates]  # fmt: skip
    return np.array(rows, float).reshape(-1, 3).T


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(items)
