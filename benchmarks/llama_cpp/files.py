"""Pairs of GGUF files for benchmarks beside llama.cpp: shipped, published and random ones."""

import dataclasses
from pathlib import Path
from typing import Any

import dflash_jax as dj
from benchmarks.cases import Shape, random_drafter
from dflash_jax.converters.convert import convert
from dflash_jax.converters.export import Weights, export
from dflash_jax.converters.formats.gguf.file import STRING
from dflash_jax.converters.formats.gguf.writer import I32, U32, Typed
from dflash_jax.converters.forms import GGUF
from dflash_jax.converters.gguf.tokenizer import CONTROL, NORMAL
from dflash_jax.converters.models import open_model
from dflash_jax.converters.target_tokenizer import for_drafter
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params
from dflash_jax.utils.sources import find_smollm2

DATA = Path(dj.__file__).parent / "data"
TINY = "tiny"
SMOLLM2 = "smollm2"
SHIPPED = "smollm2-shipped"
BLOCK = 8  # tokens of a random drafter's block, with the anchor
DRAFTER_LAYERS = 2
SEED = 1
BASE = "f32"  # the type from which the others are converted


RANDOM = {
    "2m": Shape(128, 4, 2, 384, 2048),  # for trying out
    "60m": Shape(512, 14, 8, 1536),
    "350m": Shape(1024, 28, 16, 2816),
}
MODELS = (TINY, SMOLLM2, SHIPPED, *RANDOM)


@dataclasses.dataclass(frozen=True)
class PairFiles:
    """GGUF files of a target and its drafter."""

    target: Path
    drafter: Path


def write_pair(name: str, kind: str, folder: Path) -> PairFiles:
    """Return the files of a pair in a GGUF type, written into `folder` unless they are there.

    Args:
      name: one of `MODELS`. Drafters of "tiny" and "smollm2-shipped" are the shipped ones, others
        have random weights.
      kind: one of `GGUF_TYPES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pair = PairFiles(*(folder / f"{name}-{kind}-{role}.gguf" for role in ("target", "drafter")))
    if pair.target.is_file() and pair.drafter.is_file():
        return pair
    if kind == BASE:
        _write_base(name, pair)
        return pair
    base = write_pair(name, BASE, folder)
    convert(open_model(base.target), pair.target, to=GGUF, dtype=kind, overwrite=True)
    convert(
        open_model(base.drafter), pair.drafter, to=GGUF, dtype=kind, tokenizer=base.target,
        overwrite=True,
    )  # fmt: skip
    return pair


def shipped_blocks() -> tuple[int, int]:
    """Return the tokens of a block of SmolLM2's drafter, all and as it advises, with the anchor."""
    config: Any = open_model(DATA / SMOLLM2 / "drafter").config
    return config.block_size, 1 + config.speculative_tokens


def _write_base(name: str, pair: PairFiles) -> None:
    if name in (TINY, SHIPPED):
        shipped = DATA / (TINY if name == TINY else SMOLLM2)
        target = shipped / "target" if name == TINY else find_smollm2()
        convert(open_model(target), pair.target, to=GGUF, dtype=BASE, overwrite=True)
        convert(
            open_model(shipped / "drafter"),
            pair.drafter,
            to=GGUF,
            dtype=BASE,
            tokenizer=target,
            overwrite=True,
        )
        return
    if name == SMOLLM2:
        source = open_model(find_smollm2())
        convert(source, pair.target, to=GGUF, dtype=BASE, overwrite=True)
        _write_random(source.config, for_drafter(source.config, source), pair, target=False)
    else:
        size = RANDOM[name]
        _write_random(size.target("llama"), _numbered(size.vocabulary), pair)


def _write_random(
    config: Any, tokenizer: dict[str, Any], pair: PairFiles, *, target: bool = True
) -> None:
    """Write a random drafter for a target's config, and random weights of the target if asked."""
    drafter = random_drafter(config, DRAFTER_LAYERS, BLOCK)
    params = random_params(build_pair(config, drafter), seed=SEED)
    files = [("drafter", drafter, pair.drafter)]
    if target:
        files.insert(0, ("target", config, pair.target))
    for role, own, file in files:
        weights = Weights(own, TreeSource(params[role], own), tokenizer=tokenizer)
        export(weights, file, layout=GGUF, dtype=BASE, overwrite=True)


def _numbered(count: int) -> dict[str, Typed]:
    """Return the metadata of a vocabulary of numbers, for prompts that are given as ids."""
    tokens = ["a", "b", "ab", *(f"<{i}>" for i in range(3, count))]  # files need a merge
    kinds = [NORMAL] * (count - 1) + [CONTROL]
    return {
        "tokenizer.ggml.model": Typed(STRING, "gpt2"),
        "tokenizer.ggml.pre": Typed(STRING, "gpt-2"),
        "tokenizer.ggml.tokens": Typed(STRING, tokens),
        "tokenizer.ggml.token_type": Typed(I32, kinds),
        "tokenizer.ggml.merges": Typed(STRING, ["a b"]),
        "tokenizer.ggml.bos_token_id": Typed(U32, count - 1),
        "tokenizer.ggml.eos_token_id": Typed(U32, count - 1),
    }
