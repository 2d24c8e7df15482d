"""Run by test_in_process in a process of its own, with four virtual devices: prints JSON."""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import dflash_jax as dj
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_target

TARGET = tiny_target(num_layers=2, vocab_size=96, num_heads=8, num_kv_heads=4)
PROMPTS = [np.random.default_rng(i).integers(0, 95, 12).tolist() for i in range(12)]
SETTINGS = ["steps=3", "save_every=3", "buckets=32x4", "answer_buckets=32x4", "text_prompts=8",
            "text_prompt=12", "text_tokens=12", "held_out=1", "held_out_tokens=8"]  # fmt: skip
RECIPE = dj.recipe("smoke", SETTINGS)


def target(dtype: Any) -> dj.TargetModel:
    """Return a random target on the host."""
    params = random_params(build_pair(TARGET, None), dtype=dtype)["target"]
    return dj.TargetModel(TARGET, params, dtype)


def mesh(*shape: int, names: tuple[str, ...] = ("data", "model")) -> Mesh:
    """Return a mesh of the first devices, in reverse order."""
    count = int(np.prod(shape))
    return Mesh(np.asarray(jax.devices()[:count])[::-1].reshape(shape), names)


def trained(where: Mesh | None, dtype: str, given: Any = None) -> dict[str, Any]:
    """Train on a mesh; return the losses, what was decoded, and how arrays were placed."""
    whole: list[tuple[int, ...]] = []
    split = (32, 2, 48), (8 * 8, 32)  # gate_up and o

    def look(line: str) -> None:
        if line.startswith("drafter "):
            whole.extend(
                x.shape
                for x in jax.live_arrays()
                if x.shape in split and len(x.sharding.device_set) > 1 and x.is_fully_replicated
            )

    with tempfile.TemporaryDirectory() as folder:
        found = dj.train(
            given or target(dtype), PROMPTS, RECIPE, mesh=where, out=folder, mask_id=95,
            on_progress=look,
        )  # fmt: skip
        lines = (Path(folder) / "log.jsonl").read_text().splitlines()
        rows = np.load(Path(folder) / "rows.npz")["0.tokens"].tolist()
    leaves = jax.tree.leaves(found.target.params)
    count = 1 if where is None else where.size
    plan = dj.Plan(rows=4, max_length=32, chunk=16, prefix_cache=0)
    engine = found.engine(plan)
    engine.measures_drafting = False
    options: dict[str, Any] = {"max_tokens": 12}
    drafted, plain = (
        [x.token_ids for x in engine.generate_many(PROMPTS[:3], speculative=on, **options)]
        for on in (True, False)
    )
    return {
        "loss": [json.loads(line)["loss"] for line in lines],
        "rows": rows,
        "results": found.results,
        "lossless": drafted == plain,
        "devices": {len(x.sharding.device_set) for x in leaves} == {count},
        "share": sum(x.addressable_shards[0].data.nbytes for x in leaves)
        / sum(x.nbytes for x in leaves),
        "whole": whole if count > 1 and where is not None and where.shape["model"] > 1 else [],
        "drafts": float(np.abs(found.params["fc"].astype(np.float32)).sum()),
    }


def refused(where: Any, **changes: Any) -> str:
    """Return the error that a mesh is refused with."""
    try:
        recipe = dataclasses.replace(RECIPE, **changes)
        dj.train(target("float32"), PROMPTS, recipe, mesh=where, mask_id=95)
    except dj.DFlashError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Print what was found as JSON."""
    named = {"none": None, "2x2": mesh(2, 2)}
    if "--more" in sys.argv:
        named |= {"4x1": mesh(4, 1)}
    found: dict[str, Any] = {name: trained(where, "float32") for name, where in named.items()}
    if "--more" in sys.argv:
        found |= {f"{name} bfloat16": trained(where, "bfloat16") for name, where in named.items()}
    found["refused"] = [
        refused(mesh(2, 2, names=("fsdp", "tp"))),
        refused(mesh(3, 1)),
        refused(mesh(1, 3)),
        refused(mesh(4, 1), answer_buckets=(dataclasses.replace(RECIPE.buckets[0], rows=6),)),
        refused(mesh(1, 2), target_weights="int8"),
        refused("2x2"),
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
