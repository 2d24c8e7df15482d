"""Stacks of experts that stay as a file packs them: the same numbers, and the same tokens."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from gguf_families import Tensors, write_family
from gguf_models import Q
from weight_files import ORACLE

import dflash_jax as dj
from dflash_jax.converters.models import open_model
from dflash_jax.engine.engine import Engine
from dflash_jax.graph import Graph
from dflash_jax.graph.abstract import PlannedPair, by_path
from dflash_jax.graph.memory import budget
from dflash_jax.graph.resolve import resolve
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.interleaved import deinterleave
from dflash_jax.kernels.products import set_weight_layout
from dflash_jax.loading import OpenPair, open_pair
from dflash_jax.networks import build_pair
from dflash_jax.quant.layouts import (
    FLOAT,
    STACK,
    Interleaved,
    StructuredWeight,
    dequantise,
    pack_tree,
)
from dflash_jax.testing import random_params, scripted_engine, set_script, tiny_drafter

pytestmark = pytest.mark.skipif(
    not library(), reason=f"there are no native kernels: {library().reason}"
)
# The key of the experts' width, and that of the oracle's models.
WIDTHS = {
    "qwen3_moe": ("moe_intermediate_size", 32),
    "qwen3_5_moe": ("moe_intermediate_size", 32),
    "gemma4_moe": ("moe_intermediate_size", 24),
    "gpt_oss": ("intermediate_size", 48),
}
WIDE = 64  # as the blocks of all types need


def write(
    folder: Path,
    family: str,
    kind: Q,
    form: Callable[[Tensors], Tensors] = lambda found: found,
    *,
    width: int = WIDE,
) -> Path:
    """A model of the oracle with experts of another width."""
    source, (key, size) = ORACLE / "targets" / family, WIDTHS[family]
    config = json.loads((source / "config.json").read_text())
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    sizes = {size: width} | ({2 * size: 2 * width} if 2 * size != config["hidden_size"] else {})
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = np.resize(tensors[name], [sizes.get(n, n) for n in tensors[name].shape])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {key: width}))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return write_family(folder, folder / "x.gguf", kind, form=form)


def joined(tensors: Tensors) -> Tensors:
    """Gates above ups, in one stack."""
    found = dict(tensors)
    for name in [n for n in tensors if ".ffn_gate_exps." in n]:
        both = [found.pop(name), found.pop(name.replace("gate", "up"))]
        found[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    return found


def separate(tensors: Tensors) -> Tensors:
    """The inverse."""
    found = dict(tensors)
    for name in [n for n in tensors if ".ffn_gate_up_exps." in n]:
        both = np.split(found.pop(name), 2, axis=1)
        found |= {name.replace("gate_up", x): a for x, a in zip(("gate", "up"), both, strict=True)}
    return found


def stacks(pair: OpenPair) -> frozenset[str]:
    """The paths of the target's stacks."""
    forms = PlannedPair(pair.pair, dj.plan.LEAST).forms
    found = (path for path, form in forms.items() if form == STACK)
    return frozenset(path.removeprefix("target/") for path in found)


def resolved(pair: OpenPair, platform: str = "cpu", **choices: Any) -> Any:
    plan = pair.with_stored(dj.Plan(max_length=64, **choices))
    return resolve(plan, pair.pair, platform=platform, memory=1 << 40)


def scripted(opened: OpenPair, plan: dj.Plan) -> Engine:
    """An engine of the file's target with a scripted drafter."""
    target, _ = opened.configs
    pair = build_pair(target, tiny_drafter(target))
    plan = resolve(opened.with_stored(plan), pair, platform="cpu", memory=1 << 40)
    graph = Graph(pair, plan)
    drafter = {"drafter": random_params(pair)["drafter"]}
    params = opened.weights(plan) | pack_tree(drafter, graph.specs)
    set_weight_layout(params, graph.forms, native=plan.kernels == "native")
    return scripted_engine(Engine(graph, jax.device_put(params)))


@pytest.mark.parametrize(
    ("family", "kind", "form"),
    [
        ("qwen3_moe", Q.Q4_0, separate),
        ("qwen3_moe", Q.Q8_0, joined),
        ("qwen3_5_moe", Q.Q5_0, separate),
        ("gemma4_moe", Q.Q4_1, joined),
        ("gemma4_moe", Q.Q4_0, separate),
        ("gpt_oss", Q.MXFP4, separate),
        ("gpt_oss", Q.Q8_0, joined),
    ],
)
def test_packed_stacks_are_the_float_ones_bit_for_bit(
    tmp_path: Path, family: str, kind: Q, form: Callable[[Tensors], Tensors]
) -> None:
    path = write(tmp_path / "x", family, kind, form)
    model, paths = open_model(path), stacks(open_pair(path, None))
    specs = model.stored(paths)
    assert specs.keys() == paths
    assert not model.unpacked_kinds(paths, specs)
    floats = by_path(model.load("float32"))
    found = by_path(model.load("float32", specs=specs, native=True), StructuredWeight)
    for at in paths:
        made = found[at]
        assert isinstance(made, Interleaved)
        assert (made.stacked, made.shape) == (True, floats[at].shape)
        for e, wanted in enumerate(floats[at]):
            one = deinterleave(made.expert(e))
            ours = dequantise(one.arrays, one.kind).reshape(one.shape)
            np.testing.assert_array_equal(ours.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize(
    ("family", "kind", "width"),
    [("qwen3_moe", Q.Q4_0, WIDE), ("gpt_oss", Q.MXFP4, WIDE), ("gpt_oss", Q.Q8_0, 48)],
)
def test_drafted_tokens_by_packed_experts_are_those_of_plain_decoding(
    tmp_path: Path, family: str, kind: Q, width: int
) -> None:
    """Experts of 48 inputs stay floats, beside packed gates and ups."""
    pair = open_pair(write(tmp_path / "x", family, kind, width=width), None)
    engine = scripted(pair, dj.Plan(max_length=96, chunk=16, block=4, rows=2, dtype="float32"))
    found = by_path(engine.params["target"], Interleaved)
    packed = {at: found[at].kind != FLOAT for at in stacks(pair)}
    assert all(found[at].stacked for at in packed)
    assert all(kept or (width % 32 and at.endswith("down")) for at, kept in packed.items())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params))
    assert budget(engine.graph).weights == size
    prompt = [5, 9, 2, 44] * 5
    plain = engine.generate(prompt, max_tokens=24, speculative=False).token_ids
    assert len({*plain}) > 4
    rng = np.random.default_rng(0)
    for share in (0.0, 0.7, 1.0):
        truth = [*prompt, *plain]
        right = rng.random(len(truth)) < share
        set_script(engine, [t if ok else t ^ 1 for t, ok in zip(truth, right, strict=True)])
        result = engine.generate(prompt, max_tokens=24)
        assert result.token_ids == plain
        assert max(result.stats.acceptance_lengths) == (4 if share else 1)


def test_only_native_kernels_keep_stacks_packed(tmp_path: Path) -> None:
    pair = open_pair(write(tmp_path / "x", "qwen3_moe", Q.Q8_0), None)
    whole = {f"target/{path}" for path in stacks(pair)}
    assert whole <= dict(resolved(pair).stored).keys()
    for platform, choices in (("gpu", {}), ("cpu", {"weights": "packed", "kernels": "xla"})):
        plan = resolved(pair, platform, **choices)
        assert plan.weights == "packed"
        assert whole.isdisjoint(dict(plan.stored))
    assert resolved(pair, kernels="xla").weights == "float"
    noted: list[str] = []
    plan = dj.Plan(weights="packed", kernels="xla", max_length=64)
    dataclasses.replace(pair, report=noted.append).planned(plan)
    assert "in Q8_0 are unpacked" in noted[0]


def test_stacks_whose_gates_and_ups_have_other_types_are_unpacked(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "qwen3_moe", Q.Q8_0)
    model, paths = open_model(path), stacks(open_pair(path, None))
    source = model.tensors.source
    kind = source.kind
    source.kind = lambda name: "Q4_0" if "ffn_up_exps" in name else kind(name)
    assert all(at.endswith("down") for at in model.stored(paths))
