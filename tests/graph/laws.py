"""The exact law of what an engine over a small vocabulary says, and how well samples fit it."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import chdtrc

from dflash_jax.engine.engine import Engine
from dflash_jax.target_model import TargetModel

VOCAB, ROWS, SAID = 6, 256, 4
PROMPT = [3, 1, 4, 1, 5]


def filtered(
    logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    """The definition, for a row of logits: temperature, min-p, top-k, then top-p on the rest."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[np.exp(scaled[order] - scaled[order[0]]) >= min_p]
    kept = order[: top_k or None]
    p = np.exp(scaled[kept] - scaled[kept].max())
    p /= p.sum()
    inside = np.cumsum(p) - p < top_p
    out = np.zeros(len(logits))
    out[kept[inside]] = p[inside] / p[inside].sum()
    return out


def said(engine: Engine, seeds: range, **options: Any) -> tuple[np.ndarray, Any]:
    lives = []
    for seed in seeds:
        while engine.core.queued == engine.plan.queue:
            engine.advance()
        lives.append(engine.submit(PROMPT, max_tokens=SAID, seed=seed, **options))
    while not all(live.done for live in lives):
        engine.advance()
    return np.array([live.result().token_ids for live in lives]), [live.stats for live in lives]


def all_logits(engine: Engine) -> dict[tuple[int, ...], np.ndarray]:
    """By continuation but its last token: the target's logits of each place, by a whole pass."""
    said = np.array(list(itertools.product(range(VOCAB), repeat=SAID - 1)))
    ids = np.concatenate([np.tile(PROMPT, (len(said), 1)), said], axis=1)
    logits = (
        TargetModel(engine.graph.config, engine.params["target"], "float32").forward(ids).logits
    )
    places = np.asarray(logits)[:, len(PROMPT) - 1 :]
    return dict(zip(map(tuple, said.tolist()), places, strict=True))


def law(
    next_logits: dict[tuple[int, ...], np.ndarray],
    shape: Callable[[np.ndarray, tuple[int, ...]], np.ndarray] = lambda row, said: row,
    **filters: Any,
) -> np.ndarray:
    """Exact probability of every continuation of SAID tokens.

    `shape` is what a request adds to a row of logits, given what was said before.
    """
    p = []
    for prefix, rows in next_logits.items():  # in the order of `product`
        processed = [shape(row, prefix[:i]) for i, row in enumerate(rows)]
        steps = np.stack([filtered(row, **filters) for row in processed])
        p.append(np.prod(steps[range(SAID - 1), prefix]) * steps[-1])
    return np.concatenate(p)


def likelihood(tokens: np.ndarray, p: np.ndarray) -> float:
    """p-value of the chi-square test; rare continuations are counted together."""
    codes = tokens @ VOCAB ** np.arange(SAID - 1, -1, -1)
    counts = np.bincount(codes, minlength=len(p))
    assert counts[p == 0].sum() == 0, "a continuation the target cannot say"
    expected = p * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
        expected = expected * observed.sum() / expected.sum()
    assert len(expected) > 10
    return chisquare(observed, expected)


def chisquare(observed: np.ndarray, expected: np.ndarray) -> float:
    """p-value of counts; importing `scipy.stats` for it takes longer than most tests."""
    return float(chdtrc(len(expected) - 1, ((observed - expected) ** 2 / expected).sum()))
