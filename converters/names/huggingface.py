"""Tensor names as Hugging Face folders spell them, made canonical."""

import re
from collections.abc import Mapping

import numpy as np

from converters.canonical import Canonical, Origin
from converters.source import TensorSource
from dflash_jax.errors import CheckpointError

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
SPELT_OTHERWISE = {  # as in the Muse drafters
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
NONE: Mapping[str, str] = {}
ALWAYS_IGNORED = {r"rotary_emb\.inv_freq$": "recomputed from the configuration"}


def target(source: TensorSource, *, tied: bool, ignored: Mapping[str, str] = NONE) -> Canonical:
    """A target's folder; a tied head that repeats the embedding is dropped, another refused.

    `ignored` are patterns of tensors that are not part of the text model, and why.
    """
    found = canonical(source, ALWAYS_IGNORED | dict(ignored))
    if tied and "lm_head.weight" in found.origins:
        head = found.origins.pop("lm_head.weight").name
        if not _equal(found, source, head):
            raise CheckpointError(
                f"tie_word_embeddings is true but {head} differs from the embedding table;"
                " set tie_word_embeddings to false in config.json if the head is to be used"
            )
        found.ignored[head] = "tied: equal to the embedding table"
    return found


def drafter(source: TensorSource) -> Canonical:
    """A drafter's folder; copies of the target's embedding and head are not used."""
    borrowed = "borrowed from the target"
    ignored = {r"^embed_tokens\.weight$": borrowed, r"^lm_head\.weight$": borrowed}
    return canonical(source, ALWAYS_IGNORED | ignored)


def canonical(source: TensorSource, ignored: dict[str, str]) -> Canonical:
    """Names without their prefix; those matching a pattern of `ignored` set aside."""
    origins: dict[str, Origin] = {}
    dropped: dict[str, str] = {}
    for name in source.names():
        short = strip(name)
        reason = next((why for what, why in ignored.items() if re.search(what, short)), None)
        if reason:
            dropped[name] = reason
        elif short in origins:
            raise CheckpointError(
                f"{name} and {origins[short].name} both mean {short}; keep one of them"
            )
        else:
            origins[short] = Origin(name)
    return Canonical(source, origins, dropped)


def strip(name: str) -> str:
    """A stored name without the prefixes that wrappers add, in the usual spelling."""
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    short = name.removeprefix(prefix)
    return SPELT_OTHERWISE.get(short, short)


def _equal(found: Canonical, source: TensorSource, head: str) -> bool:
    table = found.origins.get("embed_tokens.weight")
    if table is None or source.shape(table.name) != source.shape(head):
        return False
    return np.array_equal(source.read(table.name), source.read(head))
