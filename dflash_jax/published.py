"""Published drafters, by the target they were trained for.

Names and shapes are those of the models' configs and cards on the Hugging Face hub.
"""

import re
from pathlib import Path
from typing import NamedTuple

from dflash_jax.config import TargetConfig
from dflash_jax.errors import CheckpointError
from dflash_jax.utils.sources import Source


class PublishedDrafter(NamedTuple):
    """A drafter on the hub, and the target it was trained for."""

    target: str  # hub id
    shape: tuple[int, int, int]  # the target's width, number of layers and vocabulary
    drafter: str  # hub id
    block: int  # tokens


# Of several drafters for one target, the one to prefer is first.
TABLE = """
Qwen/Qwen3-4B                     2560 36 151936  z-lab/Qwen3-4B-DFlash-b16                   16
Qwen/Qwen3-4B                     2560 36 151936  deepseek-ai/dspark_qwen3_4b_block7           7
Qwen/Qwen3-8B                     4096 36 151936  z-lab/Qwen3-8B-DFlash-b16                   16
Qwen/Qwen3-8B                     4096 36 151936  deepseek-ai/dspark_qwen3_8b_block7           7
Qwen/Qwen3-14B                    5120 40 151936  deepseek-ai/dspark_qwen3_14b_block7          7
Qwen/Qwen3-Coder-30B-A3B-Instruct 2048 48 151936  z-lab/Qwen3-Coder-30B-A3B-DFlash            16
Qwen/Qwen3.5-4B                   2560 32 248320  z-lab/Qwen3.5-4B-DFlash                     16
Qwen/Qwen3.5-9B                   4096 32 248320  z-lab/Qwen3.5-9B-DFlash                     16
Qwen/Qwen3.5-27B                  5120 64 248320  z-lab/Qwen3.5-27B-DFlash                    16
Qwen/Qwen3.5-35B-A3B              2048 40 248320  z-lab/Qwen3.5-35B-A3B-DFlash                16
Qwen/Qwen3.6-27B                  5120 64 248320  z-lab/Qwen3.6-27B-DFlash                    16
Qwen/Qwen3.6-35B-A3B              2048 40 248320  z-lab/Qwen3.6-35B-A3B-DFlash                16
Qwen/Qwen3.8-27B                  5120 64 248320  z-lab/Qwen3.8-27B-DFlash2                    8
google/gemma-4-31B-it             5376 60 262144  z-lab/gemma-4-31B-it-DFlash                 16
google/gemma-4-26B-A4B-it         2816 30 262144  z-lab/gemma-4-26B-A4B-it-DFlash             16
openai/gpt-oss-20b                2880 24 201088  z-lab/gpt-oss-20b-DFlash                     8
openai/gpt-oss-120b               2880 36 201088  z-lab/gpt-oss-120b-DFlash                   10
meta-llama/Llama-3.1-8B-Instruct  4096 32 128256  z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat 10
"""


def _row(line: str) -> PublishedDrafter:
    target, *shape, drafter, block = line.split()
    width, layers, vocab = map(int, shape)
    return PublishedDrafter(target, (width, layers, vocab), drafter, int(block))


DRAFTERS = tuple(map(_row, TABLE.strip().splitlines()))

# Endings of file and repository names that tell how weights are stored, not which model it is.
STORED_AS = re.compile(
    r"-(gguf|ud|unquantized|awq|gptq|int[48]|fp8|bf16|fp16|f16|f32|mxfp4|w[48]a(8|16)|[48]bit"
    r"|i?q\d(-[01k])?(-(xxs|xs|s|m|l|xl|nl))?|tq[12]-0)$"
)


def by_shape(config: TargetConfig) -> list[PublishedDrafter]:
    """Return the drafters whose targets have the shape of a target."""
    shape = config.hidden_size, config.num_layers, config.vocab_size
    return [x for x in DRAFTERS if x.shape == shape]


def by_name(source: Source, config: TargetConfig) -> list[PublishedDrafter]:
    """Return the drafters that were trained for a target, the one to prefer first.

    A target is recognised by its shape and by its name: that of a hub id, a folder or a file,
    without what tells how its weights are stored.
    """
    parts = Path(source).absolute().parts[-3:]  # the hub's cache: NAME/snapshots/REVISION
    names = {_model_name(part) for part in parts}
    return [x for x in by_shape(config) if _model_name(x.target.split("/")[1]) in names]


def choose(source: Source, config: TargetConfig) -> PublishedDrafter:
    """Return the drafter to prefer for a target.

    Raises:
      CheckpointError: no drafter is known to be trained for it.
    """
    if known := by_name(source, config):
        return known[0]
    similar = ", ".join(f"{x.drafter} (for {x.target})" for x in by_shape(config))
    raise CheckpointError(
        f"no published drafter is known for {source}; give a drafter's folder, .gguf file or hub"
        " id, or none" + (f". Those for models of its shape may fit: {similar}" if similar else "")
    )


def _model_name(text: str) -> str:
    """Return a name in one spelling: "models--Qwen--Qwen3-8B-AWQ" is "qwen3-8b"."""
    text = text.split("--")[-1].lower().removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9.]+", "-", text).removeprefix("meta-")
    while STORED_AS.search(name):
        name = STORED_AS.sub("", name)
    return name
