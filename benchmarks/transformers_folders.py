"""Folders of every family that transformers and dflash_jax write for each other.

    pip install torch transformers
    python -m benchmarks.transformers_folders [FAMILY ...] [--json OUT]

A small random model of each family (the folders of tests/oracle/targets) is saved by transformers
and loaded here; what `convert` writes of it is loaded there again. Both must give the logits of the
first, the same greedy tokens, and the same special ids.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import open_model
from dflash_jax.loading import load_target

HERE = Path(__file__).parent
FOLDERS = HERE.parent / "tests" / "oracle" / "targets"
# Families that transformers reads by another class.
WRAPPED = ("gemma4_vl", "qwen3_5_vl", "qwen3_5_moe_vl")
PROMPT = 24  # tokens
TOKENS = 16  # of an answer
TOLERANCE = 2e-4
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def loaded(folder: Path) -> Any:
    """Return a folder's model in float32, with attention and experts in their plain form."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


@torch.no_grad()
def outputs(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the greedy continuation of a prompt, and the logits of all its tokens."""
    tokens = torch.as_tensor(prompt)
    for _ in range(TOKENS):
        best = model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, best], dim=1)
    return tokens.numpy(), model(input_ids=tokens, use_cache=False).logits.numpy()


def special_ids(model: Any) -> list[Any]:
    """Return the ids of a model's config, single ones as lists."""
    ids = [getattr(model.config, name, None) for name in IDS]
    return [i if isinstance(i, list) or i is None else [i] for i in ids]


def measure(family: str, work: Path) -> dict[str, Any]:
    """Return the differences of one family, after a check that they are small."""
    theirs = work / "theirs"
    ours = work / "ours"
    loaded(FOLDERS / family).save_pretrained(theirs)
    first = loaded(theirs)
    vocabulary = first.config.vocab_size
    prompt = np.random.default_rng(0).integers(3, vocabulary, (2, PROMPT))
    tokens, logits = outputs(first, prompt)
    read = np.asarray(load_target(theirs, dtype="float32").forward(tokens).logits)
    convert(open_model(theirs, role="target"), ours, dtype="float32")
    second = loaded(ours)
    again, written = outputs(second, prompt)
    figures = {
        "read_max_abs": float(np.abs(read - logits).max()),
        "written_max_abs": float(np.abs(written - logits).max()),
        "logits_std": float(logits.std()),
        "tokens": int(tokens.size - prompt.size),
        "different_tokens": int((again != tokens).sum()),
        "different_tokens_here": int(
            (read[:, PROMPT - 1 : -1].argmax(-1) != tokens[:, PROMPT:]).sum()
        ),
        "special_ids": special_ids(second) == special_ids(first),
    }
    least = max(figures["read_max_abs"], figures["written_max_abs"])
    differences = figures["different_tokens"] + figures["different_tokens_here"]
    figures["equal"] = least < TOLERANCE and not differences and figures["special_ids"]
    return figures


def main() -> None:
    """Measure the families, print a line each, and write the result of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = sorted(p.name for p in FOLDERS.iterdir() if p.is_dir() and p.name not in WRAPPED)
    parser.add_argument("families", nargs="*", default=known, metavar="FAMILY")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    results = {}
    for family in options.families:
        with tempfile.TemporaryDirectory() as work:
            try:
                results[family] = measure(family, Path(work))
            except Exception as error:  # one family must not end the others
                results[family] = {"equal": False, "error": f"{type(error).__name__}: {error}"}
        print(family, json.dumps(results[family]), flush=True)
    if options.json:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        options.json.write_text(json.dumps(versions | {"families": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
