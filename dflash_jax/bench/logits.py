"""How far the next-token probabilities of two models are apart, on given texts."""

import dataclasses
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dflash_jax import loading
from dflash_jax.errors import RequestError
from dflash_jax.target_model import TargetModel

GRID = 64  # lengths are padded to multiples, since every length is compiled
ROWS = 32  # positions whose probabilities are in memory at a time
SHOWN = 40  # characters of a prompt
Ids = Int[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True)
class PromptDistance:
    """Two models on one prompt.

    Attributes:
      divergence: Kullback-Leibler divergence of the second from the first, in nats, by position.
      same_top: whether both have the same most probable token, by position.
      surprise: negative log-probabilities of the tokens that follow, by the two models.
    """

    text: str
    divergence: Float[np.ndarray, " T"]
    same_top: np.ndarray
    surprise: Float[np.ndarray, "2 T-1"]


def distances(
    first: Path,
    second: Path,
    texts: Sequence[str],
    *,
    most_tokens: int,
    load: Callable[..., TargetModel] = loading.load_target,
) -> list[PromptDistance]:
    """Compare two targets in float32 on texts, of which the first model's tokens are read.

    One of the models is in memory at a time.

    Raises:
      RequestError: the first has no tokenizer, or a text is empty or has tokens that a model lacks.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = load(first, dtype="float32")
        if model.tokenizer is None:
            raise RequestError(f"{first} has no tokenizer, so it cannot read prompts")
        ids = [np.array(model.tokenizer.encode(text)[:most_tokens], np.int32) for text in texts]
        for text, tokens in zip(texts, ids, strict=True):
            if len(tokens) < 2:
                raise RequestError(f"the prompt {text!r} has {len(tokens)} tokens; give at least 2")
        kept = [Path(folder) / f"{i}.npy" for i in range(len(ids))]
        for tokens, path in zip(ids, kept, strict=True):
            np.save(path, logits(model, tokens))
        del model
        gc.collect()
        other = load(second, dtype="float32")
        return [
            compared(text, tokens, np.load(path, mmap_mode="r"), logits(other, tokens))
            for text, tokens, path in zip(texts, ids, kept, strict=True)
        ]


def logits(model: TargetModel, ids: Ids) -> Float[np.ndarray, "T V"]:
    """Return a model's logits at every position of a text."""
    padded = np.zeros(-(-len(ids) // GRID) * GRID, np.int32)
    padded[: len(ids)] = ids  # later tokens change nothing before them
    return np.asarray(model.forward([padded.tolist()]).logits)[0, : len(ids)]


def compared(
    text: str,
    ids: Ids,
    ours: Float[np.ndarray, "T V"],
    theirs: Float[np.ndarray, "T W"],
) -> PromptDistance:
    """Return the distance of two models' logits; padding of a vocabulary is left out."""
    size = min(ours.shape[1], theirs.shape[1])
    if ids.max() >= size:
        raise RequestError(f"the prompt {text[:SHOWN]!r} has tokens that one of the models lacks")
    divergence: list[np.ndarray] = []
    same: list[np.ndarray] = []
    surprise: list[np.ndarray] = []
    for start in range(0, len(ids), ROWS):
        a, b = (_log_softmax(x[start : start + ROWS, :size]) for x in (ours, theirs))
        divergence.append((np.exp(a) * (a - b)).sum(axis=1))
        same.append(a.argmax(axis=1) == b.argmax(axis=1))
        following = ids[start + 1 : start + 1 + ROWS]
        places = np.arange(len(following))
        surprise.append(-np.stack([a[places, following], b[places, following]]))
    return PromptDistance(
        text=text,
        divergence=np.maximum(np.concatenate(divergence), 0),
        same_top=np.concatenate(same),
        surprise=np.concatenate(surprise, axis=1),
    )


def _log_softmax(values: Float[np.ndarray, "T V"]) -> Float[np.ndarray, "T V"]:
    exact = values.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))


def summary(distances: Sequence[PromptDistance]) -> dict[str, Any]:
    """Return the figures of all prompts together, and of each."""
    whole = PromptDistance(
        text="",
        divergence=np.concatenate([x.divergence for x in distances]),
        same_top=np.concatenate([x.same_top for x in distances]),
        surprise=np.concatenate([x.surprise for x in distances], axis=1),
    )
    return _figures(whole) | {"prompts": [{"text": x.text} | _figures(x) for x in distances]}


def _figures(distance: PromptDistance) -> dict[str, Any]:
    spread = np.quantile(distance.divergence, [0.5, 0.99])
    perplexity = np.exp(distance.surprise.mean(axis=1))
    return {
        "tokens": len(distance.divergence),
        "kl_mean": float(distance.divergence.mean()),
        "kl_median": float(spread[0]),
        "kl_99": float(spread[1]),
        "kl_max": float(distance.divergence.max()),
        "same_top": float(distance.same_top.mean()),
        "perplexity": [float(value) for value in perplexity],
    }


def lines(report: dict[str, Any]) -> list[str]:
    """Return the figures as text, a line for each prompt and one for all."""
    prompts = report["prompts"]
    rows = [_line(entry, repr(entry["text"][:SHOWN])) for entry in prompts]
    return [*rows, _line(report, f"{len(prompts)} prompts")]


def _line(entry: dict[str, Any], name: str) -> str:
    ours, theirs = entry["perplexity"]
    return (
        f"KL mean {entry['kl_mean']:.2e} median {entry['kl_median']:.2e} 99% {entry['kl_99']:.2e}"
        f" max {entry['kl_max']:.2e}, same top token {entry['same_top']:7.2%}, perplexity"
        f" {ours:.4g} and {theirs:.4g}, {entry['tokens']} tokens: {name}"
    )


def plot(distances: Sequence[PromptDistance], path: Path, kind: str) -> None:
    """Draw the divergence of each prompt, and the share of positions above each divergence.

    Args:
      kind: of picture, such as "png".
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    by_prompt, shares = figure.subplots(1, 2)
    names = [entry.text[:24] for entry in distances]
    by_prompt.barh(range(len(distances)), [entry.divergence.mean() for entry in distances])
    by_prompt.set_yticks(range(len(distances)), names, fontsize=7, parse_math=False)
    by_prompt.invert_yaxis()
    by_prompt.set(xlabel="mean KL divergence, nats")
    values = np.sort(np.concatenate([entry.divergence for entry in distances]))
    shares.plot(np.maximum(values, 1e-12), 1 - np.arange(len(values)) / len(values))
    shares.set(xscale="log", yscale="log", xlabel="KL divergence, nats")
    shares.set(ylabel="share of positions with more")
    figure.savefig(path, dpi=150, format=kind)
