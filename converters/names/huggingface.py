"""Canonical names for the tensors of Hugging Face folders."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from dflash_jax.config import DrafterConfig
from dflash_jax.converters.formats.canonical import Canonical, Origin
from dflash_jax.converters.formats.slots import Folder
from dflash_jax.converters.formats.source import TensorSource
from dflash_jax.errors import CheckpointError
from dflash_jax.families import drafter_kinds

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
SPELT_OTHERWISE = {  # as in the Muse drafters
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
PLAIN = Folder()
RESPELT = (  # pattern, usual spelling: of ModelOpt, speculators, and older modules
    (r"^(logit_head|logits_correction)\.(prefix_gru|embed_proj)\.", r"\2."),
    (r"^logit_head\.", "markov_head."),
    (r"^(markov_w[12])(\.weight)?$", r"markov_head.\1.weight"),
    (r"^(gate_proj|joint_proj)\.", r"markov_head.\1."),
    (r"^confidence_proj\.", "confidence_head.proj."),
    (r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1"),
)
ALWAYS_IGNORED = {r"rotary_emb\.inv_freq$": "recomputed from the configuration"}


def target(source: TensorSource, *, tied: bool, folder: Folder = PLAIN) -> Canonical:
    """Return a target's tensors; a tied head is dropped if it equals the embedding table."""
    tensors = canonical(source, ALWAYS_IGNORED | dict(folder.ignored))
    if folder.fused:
        split_experts(tensors, folder.fused)
    if folder.split:
        for name in [*tensors.origins]:
            split_rows(tensors, name, folder.split(name))
    if tied and "lm_head.weight" in tensors.origins:
        head = tensors.origins["lm_head.weight"].name
        if _equal(tensors, source, head):
            del tensors.origins["lm_head.weight"]
            tensors.ignored[head] = "tied: equal to the embedding table"
    return tensors


def split_rows(tensors: Canonical, name: str, parts: Mapping[str, range | np.ndarray]) -> None:
    """Split a tensor into parts if they are all of its rows; `check` reports any other."""
    stored = tensors.origins[name].name
    if parts and tensors.source.shape(stored)[:1] == (sum(map(len, parts.values())),):
        del tensors.origins[name]
        tensors.origins |= {part: Origin(stored, rows) for part, rows in parts.items()}


def split_experts(tensors: Canonical, pattern: str) -> None:
    """Split tensors that hold all experts of a layer into one tensor for each expert.

    Raises:
      CheckpointError: a tensor has another shape.
    """
    for name in [n for n in tensors.origins if re.search(pattern, n)]:
        stored = tensors.origins[name].name
        shape = tensors.source.shape(stored)
        stem, _, which = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        if len(shape) != 3 or shape[1] % len(parts):
            raise CheckpointError(
                f"{stored} has the shape {list(shape)}; expected [experts, {len(parts)} x out, in]"
            )
        del tensors.origins[name]
        size = shape[1] // len(parts)
        for i in range(shape[0] * len(parts)):
            expert, part = divmod(i, len(parts))
            rows = range(i * size, (i + 1) * size)
            tensors.origins[f"{stem}.{expert}.{parts[part]}.weight"] = Origin(stored, rows)


def drafter(source: TensorSource, config: DrafterConfig) -> Canonical:
    """Return a drafter's tensors; copies of the target's embedding and head are ignored.

    Raises:
      CheckpointError: t2d and d2t disagree about the reduced vocabulary.
    """
    borrowed = "borrowed from the target"
    ignored = ALWAYS_IGNORED | {r"^t2d$": "follows from d2t"}
    if not config.own_embedding:
        ignored[r"^embed_tokens\.weight$"] = borrowed
    if not config.own_head:
        ignored[r"^lm_head\.weight$"] = borrowed
    if config.draft_vocab_size:
        _check_mask(source)
    else:
        ignored[r"^d2t$"] = "the vocabulary is not reduced"
    return canonical(source, ignored)


def _check_mask(source: TensorSource) -> None:
    """Check that t2d, if it was filled, marks the tokens that d2t lists."""
    stored = {strip(name): name for name in source.names()}
    if not {"d2t", "t2d"} <= stored.keys():
        return
    offsets, mask = (source.read(stored[name]).reshape(-1) for name in ("d2t", "t2d"))
    listed = np.arange(len(offsets)) + offsets
    if mask.any() and not np.array_equal(np.flatnonzero(mask), listed):
        raise CheckpointError(
            f"{stored['t2d']} marks {np.count_nonzero(mask)} tokens, and not the {len(listed)} that"
            f" {stored['d2t']} lists; fetch or export the drafter again"
        )


def owned(source: TensorSource, config: DrafterConfig) -> DrafterConfig:
    """Return the config with the embedding and head that the folder itself holds.

    Drafters with a reduced vocabulary and kinds with `own_tables` may have them; others were
    trained on the target's. NaN marks a table that was never filled: the target's is used, or
    for a reduced vocabulary rows of the target's head.
    """
    if not drafter_kinds()[config.kind].own_tables and not config.draft_vocab_size:
        return config
    stored = {strip(name): name for name in source.names()}

    def has(name: str) -> bool:
        if name not in stored:
            return False
        return bool(
            np.isfinite(source.read_rows(stored[name], slice(0, 1)).astype(np.float32)).all()
        )

    return dataclasses.replace(
        config, own_embedding=has("embed_tokens.weight"), own_head=has("lm_head.weight")
    )


def canonical(source: TensorSource, ignored: dict[str, str]) -> Canonical:
    """Return tensors without the prefix of their names, apart from ignored ones.

    Args:
      ignored: reasons, by a pattern of canonical names.

    Raises:
      CheckpointError: two tensors have the same canonical name.
    """
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
    """Return a stored name without the prefixes of wrappers, in the usual spelling."""
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    short = name.removeprefix(prefix)
    for pattern, usual in RESPELT:
        short = re.sub(pattern, usual, short)
    return SPELT_OTHERWISE.get(short, short)


def _equal(tensors: Canonical, source: TensorSource, head: str) -> bool:
    table = tensors.origins.get("embed_tokens.weight")
    if table is None or source.shape(table.name) != source.shape(head):
        return False
    return np.array_equal(source.read(table.name), source.read(head))
