"""Run by test_sharding in a process of its own, with virtual devices: prints JSON."""

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax import Plan, TargetModel
from dflash_jax.config import TargetConfig
from dflash_jax.graph.build import jit
from dflash_jax.graph.placement import device_mesh, param_shardings
from dflash_jax.graph.steps.filters import LISTED
from dflash_jax.kernels.vocabulary import top_k
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.testing import (
    random_engine,
    random_params,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)

HEADS = {"num_heads": 8, "num_kv_heads": 4}
QUICK: dict[str, Any] = {"num_layers": 1, "windows": (None,), "causal": (False,)}
FAMILIES = {
    "dense": lambda: tiny_target(num_layers=2, windows=(12, None), vocab_size=96, **HEADS),
    "quick": lambda: tiny_target(num_layers=1, vocab_size=96, **HEADS),
    "moe": lambda: tiny_moe(num_layers=2, windows=(None, None), sparse=(True, True), **HEADS),
    "gpt_oss": lambda: tiny_gpt_oss(num_layers=2, windows=(12, None), **HEADS),
    "hybrid": lambda: tiny_hybrid(num_layers=2, recurrent=(True, False), **HEADS),
    "gemma": lambda: tiny_gemma(**HEADS),
}


def main() -> None:
    """Arguments: family, then meshes like 1x4; or "every" alone."""
    family, *meshes = sys.argv[1:]
    if family == "every":
        print(json.dumps({name: forward(make()) for name, make in FAMILIES.items()}))
        return
    target = FAMILIES[family]()
    shallow = QUICK if family == "quick" else {}
    drafter = tiny_drafter(target, target_layer_ids=(0,), **HEADS, **shallow)
    prompts = [np.random.default_rng(i).integers(0, 96, 5 + 9 * i).tolist() for i in range(4)]
    check_top_k()
    said, shares = {}, {}
    for mesh in ["1x1", *meshes]:
        data, model = map(int, mesh.split("x"))
        plan = Plan(
            rows=4,
            max_length=64,
            chunk=16,
            block=4,
            mesh=(data, model),
            prefix_cache=1 << 20,
            dtype="float32",
            report_drafts=True,
        )
        engine = random_engine(target, drafter, plan)
        results = engine.generate_many([*prompts, prompts[-1]], max_tokens=12, trace=True)
        said[mesh] = [[r.token_ids, *(x.rejected for x in r.trace)] for r in results]
        assert results[-1].stats.cached_tokens == 16
        if mesh != "1x1":
            leaves = jax.tree.leaves((engine.params, engine.core.runner.state))
            held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
            shares[mesh] = held / sum(x.nbytes for x in leaves)
    print(json.dumps({"said": said, "shares": shares, "devices": len(jax.devices())}))


def check_top_k() -> None:
    """Compare the largest logits of a vocabulary that is split over two devices with NumPy's."""
    mesh = device_mesh(Plan(mesh=(1, 2)))
    assert mesh is not None
    logits = np.random.default_rng(0).standard_normal((4, 256), np.float32)
    split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "model")))
    largest = jit(lambda x: tuple(found[:, :3] for found in top_k(x, LISTED)))
    values, ids = map(np.asarray, largest(split))
    expected = np.argsort(-logits, axis=1)[:, :3]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=1))


def forward(target: TargetConfig) -> dict[str, Any]:
    """One forward pass, whole and with heads and widths split over two devices."""
    params = random_params(build_pair(target, None), dtype="float32", seed=0)
    mesh = device_mesh(Plan(mesh=(1, 2)))
    assert mesh is not None
    split = jax.device_put(
        params, param_shardings(mesh, params, build_graph(target, None).model_axes)
    )
    ids = np.random.default_rng(0).integers(0, 96, (2, 13))
    whole, parts = (
        np.asarray(TargetModel(target, made["target"], "float32").forward(ids).logits)
        for made in (params, split)
    )
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(split))
    return {
        "equal": bool((whole.argmax(-1) == parts.argmax(-1)).all()),
        "error": float(np.abs(whole - parts).max() / np.abs(whole).max()),
        "share": held / sum(x.nbytes for x in jax.tree.leaves(split)),
    }


if __name__ == "__main__":
    main()
