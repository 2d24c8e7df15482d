"""Configs of a target and its drafter on disk, whose weights need not exist."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from dflash_jax.checkpoint import is_checkpoint
from dflash_jax.config import DrafterConfig, TargetConfig, check_pair, read_json
from dflash_jax.families.configs import drafter_config, read_target_config
from dflash_jax.graph import Pair
from dflash_jax.graph.ngram import NGram
from dflash_jax.loading import AUTO, NGRAM, OWN, Config, expect, locate_drafter
from dflash_jax.networks import build_pair
from dflash_jax.utils.sources import Source, locate


def describe(target: Source, drafter: Source | None = OWN, *, taps_at: str = AUTO) -> Pair:
    """Return the modules of a matching pair, whose weights need not exist.

    Arguments and errors are those of `load`.
    """
    target_config = expect(TargetConfig, _config(locate(target, "target"), read_target_config))
    drafter_path = locate_drafter(drafter, target, target_config)
    if drafter_path is None:
        ngram = NGram() if drafter == NGRAM else None
        return dataclasses.replace(build_pair(target_config), drafter=ngram)
    drafter_config = expect(DrafterConfig, _config(drafter_path, _read_drafter))
    check_pair(target_config, drafter_config, taps_at=taps_at)
    return build_pair(target_config, drafter_config)


def have_weights(target: Source, drafter: Source | None) -> bool:
    """Return whether the models are files with weights, not folders with only a config.json."""
    named = [] if drafter in (AUTO, OWN, NGRAM, None) else [locate(drafter, "drafter")]
    return all(map(_has_weights, [locate(target, "target"), *named]))


def _has_weights(path: Path) -> bool:
    return not path.is_dir() or is_checkpoint(path) or any(path.glob("*.safetensors"))


def _config(path: Path, read: Callable[[Path], Config]) -> Config:
    if not _has_weights(path):
        return read(path)
    from dflash_jax.converters.models import open_model

    return open_model(path).config


def _read_drafter(directory: Path) -> DrafterConfig:
    """Return the config of a drafter's config.json, in the published or speculators' layout."""
    from dflash_jax.converters.names import speculators

    where = str(directory / "config.json")
    fields = read_json(directory / "config.json")
    if speculators.is_speculators(fields):
        fields, _ = speculators.published_fields(fields, where=where)
    config = drafter_config(fields, where)
    return dataclasses.replace(config, own_head=bool(config.draft_vocab_size))
