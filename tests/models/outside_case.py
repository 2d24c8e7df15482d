"""Loads, runs, converts, shards, trains and serves models of the package `toy_models`.

Runs in a process in which that package is installed; the argument is an empty folder.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import jax
import numpy as np

import dflash_jax as dj
from dflash_jax import families
from dflash_jax.cli import main as command
from dflash_jax.config import DrafterConfig
from dflash_jax.converters.export import Weights, export
from dflash_jax.converters.models import open_model
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import ConfigError
from dflash_jax.families.configs import drafter_config, target_config
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params

TARGET: dict[str, Any] = {
    "model_type": "toy",
    "vocab_size": 2048,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "hidden_act": "silu",
}
DRAFTER = TARGET | {
    "model_type": "qwen3",
    "architectures": ["ToyDraftModel"],
    "num_hidden_layers": 1,
    "num_target_layers": 3,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 2047, "target_layer_ids": [0, 1], "toy_scale": 1.5},
}
PROMPT = [1, 2, 3, 4, 5]


def same(first: Any, second: Any) -> bool:
    equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), first, second)
    return all(jax.tree.leaves(equal))


def convert(folder: Path, config: Any, params: Any) -> list[str]:
    """Write and read every format of a model; return the formats that reproduced it."""
    tensors, found = TreeSource(params, config), []
    drafter = isinstance(config, DrafterConfig)
    forms = ["huggingface", "gguf"] + ["speculators"] * drafter
    for form in forms:
        path = folder / (f"{form}.gguf" if form == "gguf" else form)
        export(Weights(config, tensors), path, layout=form, dtype="float32")
        for source in (path, folder / f"{form}-converted", folder / f"{form}-orbax"):
            if source != path:
                to = "orbax" if source.name.endswith("orbax") else "safetensors"
                line = [
                    "convert",
                    path,
                    source,
                    "--to",
                    to,
                    "--tokenizer",
                    "tiny",
                    "--layer-ids",
                    "auto",
                ]
                assert command([str(word) for word in line]) == 0
            model = open_model(source)
            if same(model.load("float32"), params):
                found.append(source.name)
    return found


def generate(target: Path, drafter: Path, **plan: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"max_length": 64, "chunk": 8, "block": 4, "dtype": "float32"}
    engine = dj.load(target, drafter, plan=dj.Plan(**options | plan), compilation_cache=False)
    engine.measures_drafting = False
    drafted = engine.generate(PROMPT, max_tokens=12, ignore_eos=True)
    plain = engine.generate(PROMPT, max_tokens=12, ignore_eos=True, speculative=False)
    up = engine.params["target"]["layers_0"]["mlp"]["up"]
    [part, *_] = jax.tree.leaves(up)
    return {
        "drafted": drafted.token_ids,
        "plain": plain.token_ids,
        "rounds": drafted.stats.rounds,
        "share": part.addressable_shards[0].data.size / part.size,
        "kind": getattr(up, "kind", ""),
    }


def train(out: Path) -> dict[str, Any]:
    """Train a drafter of the outside kind for the shipped target."""
    words = ["train", "--preset", "smoke", "--out", str(out), "--set", "kind=toy_drafter"]
    sizes = ["steps=2", "prompts=4", "new_tokens=8", "held_out=1", "held_out_tokens=8"]
    assert command([*words, *(word for size in sizes for word in ("--set", size))]) == 0
    engine = dj.load("tiny", out / "drafter", compilation_cache=False)
    engine.measures_drafting = False
    texts = [
        engine.generate("Hello", max_tokens=12, speculative=drafts) for drafts in (True, False)
    ]
    return {
        "kind": engine.graph.drafter_config.kind,
        "equal": texts[0].token_ids == texts[1].token_ids,
    }


def serve(target: Path, drafter: Path) -> dict[str, Any]:
    """Serve the outside models, and ask the server which they are."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--target", target, "--drafter", drafter, "--port", port]
    line = [sys.executable, "-m", "dflash_jax", *map(str, words), "--max-length", "64"]
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.1)
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/props") as reply:
                [model] = json.load(reply)["models"]
                if "drafter" in model:  # it is loaded
                    return model
    finally:
        server.terminate()
        server.wait(30)
    return {}


def main(folder: Path) -> None:
    target, drafter = target_config(TARGET), drafter_config(DRAFTER)
    params = random_params(build_pair(target, drafter))
    found: dict[str, Any] = {"forms": {}}
    for role, config in (("target", target), ("drafter", drafter)):
        (folder / role).mkdir()
        found["forms"][role] = convert(folder / role, config, params[role])
    pair = folder / "target" / "huggingface", folder / "drafter" / "huggingface"
    found["one"] = generate(*pair)
    found["gguf"] = generate(folder / "target" / "gguf.gguf", folder / "drafter" / "gguf.gguf")
    found["int8"] = generate(*pair, weights="int8")
    found["two"] = generate(*pair, mesh=(1, 2))
    try:
        target_config(TARGET | {"model_type": "unheard"})
    except ConfigError as error:
        found["error"] = str(error)
    found["exported"] = [name for name, other in families.target_families().items() if other.to_hf]
    found["trained"] = train(folder / "run")
    found["served"] = serve(*pair)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
