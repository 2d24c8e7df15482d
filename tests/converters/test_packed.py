"""Packed blocks of files: the same numbers and tokens, in fewer bytes."""

import dataclasses
import itertools
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
from gguf_families import write_family
from gguf_models import finish, hyperparameters
from weight_files import ORACLE, pages_in_memory

import dflash_jax as dj
from dflash_jax.checkpoint import save
from dflash_jax.cli import main
from dflash_jax.converters import load as loading
from dflash_jax.converters import packed as packing
from dflash_jax.converters.cli import main as converters
from dflash_jax.converters.formats.gguf import file
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.formats.source import trim_mapped_memory
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, PlanError
from dflash_jax.graph.resolve import resolve
from dflash_jax.kernels.native import interleaved
from dflash_jax.kernels.native.build import Library
from dflash_jax.loading import OpenPair, open_pair
from dflash_jax.networks import build_pair
from dflash_jax.quant import layouts
from dflash_jax.quant.layouts import Joined, Packed
from dflash_jax.testing import planned, stored, tiny_drafter, tiny_target

Q = gguf.GGMLQuantizationType
CONFIG = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
VOCAB = 96
SHAPES = {
    "attn_q": (256, 256),
    "attn_k": (128, 256),
    "attn_v": (128, 256),
    "attn_output": (256, 256),
    "ffn_gate": (512, 256),
    "ffn_up": (512, 256),
    "ffn_down": (256, 512),
}
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_gate": "Q4_0", "ffn_up": "Q4_0"}
MIXED |= {"attn_output": "Q8_0", "ffn_down": "Q6_K", "token_embd": "Q4_K", "output": "Q6_K"}
GRIDS = {"attn_q": "IQ1_S", "attn_k": "IQ1_M", "attn_v": "IQ2_XXS", "attn_output": "IQ2_XS"}
GRIDS |= {"ffn_gate": "IQ2_S", "ffn_up": "IQ3_XXS", "ffn_down": "IQ3_S"}
GRIDS |= {"token_embd": "IQ3_S", "output": "IQ2_XXS"}
PARTLY = MIXED | {"attn_v": "F16", "attn_k": "Q5_0", "ffn_up": "F32", "token_embd": "F16"}


def blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random bytes with scales that make weights of about 1 / sqrt(D), and signs of both kinds."""
    size, width = BY_NAME[kind].block_bytes, BY_NAME[kind].block_size
    found = rng.integers(0, 256, (shape[0], shape[1] // width, size), np.uint8)
    if kind == "NVFP4":
        found[..., :4] = rng.integers(8, 20, found[..., :4].shape)
        return found.reshape(shape[0], -1)
    spans = {
        "Q5_0": 9.2,
        "Q8_0": 74,
        "Q4_0": 4.6,
        "Q4_K": 170,
        "Q6_K": 1370,
        "IQ1": 8,
        "IQ2": 60,
        "IQ3": 150,
    }
    span = spans.get(kind) or spans[kind[:3]]
    scale = np.full((*found.shape[:2], 1), shape[1] ** -0.5 / span, np.float16)
    if kind == "IQ1_M":  # the scale lies in the high halves of four bytes
        pieces = scale.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        found[..., 49::2] = found[..., 49::2] & 15 | pieces.astype(np.uint8) << 4
        return found.reshape(shape[0], -1)
    at = 208 if kind == "Q6_K" else 0
    found[..., at : at + 2] = scale.view(np.uint8)
    if kind == "Q4_K":
        found[..., 2:4] = (scale * np.float16(7)).view(np.uint8)
    return found.reshape(shape[0], -1)


def write(
    path: Path,
    kinds: dict[str, str],
    *,
    decoded: bool = False,
    scaled: tuple[str, ...] = (),
    vocabulary: int = VOCAB,
) -> Path:
    """A small Llama; with `decoded`, blocks are written as the floats that gguf makes of them.

    Args:
      scaled: tensors that are doubled by a scale beside them.
    """
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    hyperparameters(writer, CONFIG)
    shapes = {"token_embd": (vocabulary, 256), "output": (vocabulary, 256)}
    for i in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in SHAPES.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(256, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    for name in scaled:
        writer.add_tensor(f"{name}.scale", np.full(1, 2, np.float32))
    for name, shape in shapes.items():
        kind = kinds[name.split(".")[-1]]
        if kind not in {"F16", "F32"}:
            raw = blocks(kind, shape, rng)
            if decoded:
                writer.add_tensor(f"{name}.weight", gguf.quants.dequantize(raw, Q[kind]))
            else:
                writer.add_tensor(f"{name}.weight", raw, raw_dtype=Q[kind])
            continue
        values = (rng.standard_normal(shape) / 16).astype(np.float32)
        values = gguf.quants.quantize(values, Q[kind])
        writer.add_tensor(f"{name}.weight", values, raw_dtype=Q[kind])
    finish(writer)
    return path


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, dict):
        return {
            k: v for key, child in node.items() for k, v in leaves(child, f"{path}/{key}").items()
        }
    return {path[1:]: node}


def unpacked(leaf: Any) -> np.ndarray:
    if isinstance(leaf, Joined):
        return np.concatenate([unpacked(part) for part in leaf.parts], axis=leaf.axis)
    if isinstance(leaf, Packed):
        return layouts.dequantise(leaf.arrays, leaf.kind).reshape(leaf.shape)
    return leaf


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("packed") / "mixed.gguf", MIXED)


@pytest.mark.parametrize("kinds", [MIXED, PARTLY], ids=["mixed", "partly"])
def test_packed_parameters_are_the_float_ones_bit_for_bit(
    tmp_path: Path, kinds: dict[str, str]
) -> None:
    """Rotary rows in order, heads interleaved, parts of several kinds: all as in the floats."""
    model = open_model(write(tmp_path / "x.gguf", kinds))
    floats, specs = leaves(model.load("float32")), stored(model)
    found = leaves(model.load("float32", specs=specs))
    assert floats.keys() == found.keys()
    kept = {path for path, leaf in found.items() if isinstance(leaf, Packed | Joined)}
    assert kept == specs.keys()
    assert ("embed" in kept) == (kinds is MIXED)
    assert all(f"layers_1/{x}" in kept for x in ("attention/qkv", "attention/o", "mlp/gate_up"))
    for path, leaf in found.items():
        np.testing.assert_array_equal(unpacked(leaf), floats[path], path)
    qkv = found["layers_0/attention/qkv"]
    assert isinstance(qkv, Joined)
    assert [getattr(part, "kind", "float") for part in qkv.parts] == (
        ["Q4_K", "Q4_K", "Q6_K"] if kinds is MIXED else ["Q4_K", "Q5_0", "float"]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("native", [True, False], ids=["strips", "floats"])
def test_loading_holds_little_beside_the_weights_and_gives_the_file_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Neither the file's pages nor floats of its blocks are in memory at once."""
    path = write(tmp_path / "x.gguf", MIXED, vocabulary=80_000)
    resident: list[int] = []

    def counted_trim(view: np.ndarray) -> None:
        resident.append(pages_in_memory(path))
        trim_mapped_memory(view)

    for module in (packing, loading, file):
        monkeypatch.setattr(module, "trim_mapped_memory", counted_trim)
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # threads, each with a part of its own
    monkeypatch.setattr(interleaved, "PART", 1 << 20)
    monkeypatch.setattr(packing, "CHUNK", 1 << 18)
    model = open_model(path)
    specs = stored(model) if native else {}
    interleaved._library()
    tracemalloc.start()
    found = model.load("bfloat16", specs=specs, native=native)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = path.stat().st_size
    assert size > 25_000_000
    assert max(resident) < size / 2  # the kernel maps two megabytes at a time
    weights = 0 if native else sum(leaf.nbytes for leaf in leaves(found).values())
    # Strips are in huge pages, which are not counted; all floats would be twice the weights again.
    assert peak < 1.25 * weights + size / 2


def test_blocks_with_codebooks_are_the_floats_that_gguf_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every such type, through every function that reads weights."""
    path, folder = write(tmp_path / "x.gguf", GRIDS), tmp_path / "folder"
    plain = write(tmp_path / "plain.gguf", GRIDS, decoded=True)
    floats = leaves(open_model(plain).load("float32"))
    packed = leaves(open_model(path).load("float32", specs=stored(open_model(path))))
    assert {leaf.kind for leaf in packed.values() if isinstance(leaf, Packed)} == {"int8_16"}
    for name, leaf in packed.items():
        np.testing.assert_array_equal(unpacked(leaf), floats[name], name)
    assert converters(["inspect", "--json", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problem"] is None
    assert report["bytes_by_type"].keys() == {*GRIDS.values(), "F32"}
    assert converters(["convert", "--dtype", "float32", str(path), str(folder)]) == 0
    assert converters(["compare", str(path), str(folder)]) == 0
    for source in (path, folder):
        found = leaves(open_model(source).load("float32"))
        assert found.keys() == floats.keys()
        for name, leaf in found.items():
            np.testing.assert_array_equal(leaf, floats[name], name)


@pytest.mark.parametrize(("width", "kept"), [(32, Packed), (24, np.ndarray)])
def test_packed_columns_of_value_heads_are_moved_as_whole_blocks(
    tmp_path: Path, width: int, kept: type
) -> None:
    """Qwen3.5 files tile value heads: only heads as wide as blocks are moved."""
    sizes = {24: width, 96: 4 * width, 160: 64 + 4 * width}
    config = json.loads((ORACLE / "targets/qwen3_5/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"linear_value_head_dim": width}))
    tensors = safetensors.numpy.load_file(ORACLE / "targets/qwen3_5/model.safetensors")
    for name in [n for n in tensors if "linear_attn" in n]:
        tensors[name] = np.resize(tensors[name], [sizes.get(n, n) for n in tensors[name].shape])
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    model = open_model(write_family(tmp_path, tmp_path / "x.gguf", Q.Q8_0))
    floats = leaves(model.load("float32"))
    found = leaves(model.load("float32", specs=stored(model)))
    assert isinstance(found["layers_0/delta/out"], kept)
    for path, leaf in found.items():
        np.testing.assert_array_equal(unpacked(leaf), floats[path], path)


def test_blocks_with_a_scale_beside_them_are_unpacked(tmp_path: Path) -> None:
    kinds = MIXED | {"attn_output": "NVFP4"}
    path = write(tmp_path / "x.gguf", kinds, scaled=("blk.0.attn_output",))
    model, plain = open_model(path), open_model(write(tmp_path / "plain.gguf", kinds))
    specs = stored(model)
    assert specs.keys() == stored(plain).keys() - {"layers_0/attention/o"}
    floats, found = leaves(model.load("float32")), leaves(model.load("float32", specs=specs))
    for name, leaf in found.items():
        np.testing.assert_array_equal(unpacked(leaf), floats[name], name)
    once = plain.load("float32")["layers_0"]["attention"]["o"]
    np.testing.assert_array_equal(found["layers_0/attention/o"], 2 * once)


def test_decoding_from_packed_blocks_is_decoding_from_their_floats(mixed: Path) -> None:
    plan = dj.Plan(max_length=64, chunk=16, block=4, dtype="float32")
    packed, floats = (
        dj.load(mixed, None, plan=dataclasses.replace(plan, weights=weights))
        for weights in ("packed", "float")
    )
    prompt = [5, 9, 2, 44]
    tokens = packed.generate(prompt, max_tokens=24).token_ids
    assert tokens == floats.generate(prompt, max_tokens=24).token_ids
    assert len(set(tokens)) > 3
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(packed.params))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(floats.params))
    assert size < whole / 4


def test_a_plan_for_packed_weights_is_json_and_counts_their_bytes(mixed: Path) -> None:
    from dflash_jax.graph.memory import budget, weight_bytes

    pair = open_pair(mixed, None)
    plan = pair.with_stored(
        dj.Plan(weights="packed", dtype="float32", max_length=64, block=4, chunk=16)
    )
    assert dj.Plan.parse(plan.to_json()) == plan
    assert len({plan, dataclasses.replace(plan)}) == 1
    target, _ = pair.configs
    sizes = weight_bytes(planned(target, None, plan))["target"]
    assert sizes["head"] == VOCAB * 256 * 6.5625 / 8
    assert sizes["layers_0/mlp/gate_up"] == 2 * 512 * 256 * 4.5 / 8
    found = pair.engine(plan).params
    assert budget(planned(target, None, plan)).weights == sum(
        x.nbytes for x in jax.tree.leaves(found)
    )


@pytest.mark.soak
def test_explain_counts_packed_weights(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", str(mixed), "--max-length", "64", "--chunk", "16", "--json"]
    sizes = {}
    for weights in ("float", "packed", "int4"):
        assert main(["explain", *options, "--dtype", "float32", "--weights", weights]) == 0
        sizes[weights] = json.loads(capsys.readouterr().out)["budget"]["weights"]
    assert sizes["packed"] < sizes["float"] / 4
    assert sizes["int4"] < sizes["float"] / 4
    assert main(["explain", *options[:-1], "--weights", "packed", "--kv-dtype", "int8"]) == 0
    assert "packed weights  int8 keys and values" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_floats_are_quantised_while_they_are_read(
    mixed: Path, weights: str, tmp_path: Path
) -> None:

    model = open_model(mixed)
    plan = dj.Plan(weights=weights)
    specs = {
        p.removeprefix("target/"): s for p, s in planned(model.config, None, plan).specs.items()
    }
    found = leaves(model.load("bfloat16", specs=specs))
    floats = leaves(model.load("float32"))
    assert isinstance(found["head"], Packed)
    assert found["head"].kind == "int8"
    save(tmp_path / "ours", model.config, model.load("float32"))
    again = leaves(open_model(tmp_path / "ours").load("bfloat16", specs=specs))
    for path, source in itertools.product(specs, (found, again)):
        wanted, got = floats[path], source[path]
        error = np.linalg.norm(unpacked(got) - wanted) / np.linalg.norm(wanted)
        assert error < (0.02 if got.kind == "int8" else 0.12), path
    assert found["embed"].dtype.name == again["embed"].dtype.name == "bfloat16"


def test_what_cannot_stay_packed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"as the file packs them.*'int8' or 'int4'"):
        dj.load("tiny", plan=dj.Plan(weights="packed"))
    path = write(tmp_path / "x.gguf", MIXED)
    model = open_model(path)
    source = model.tensors.source
    raw = source.raw("output.weight")
    at = path.read_bytes().find(raw[3].tobytes())
    with path.open("r+b") as file:
        file.seek(at + 208)
        file.write(np.float16(np.nan).tobytes())
    model = open_model(path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*NaN"):
        model.load("float32", specs=stored(model))


@pytest.fixture(params=[True, False], ids=["kernels", "no kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there are native kernels, as far as plans are concerned."""
    found = Library(Path("kernels.so")) if request.param else Library(None, "no compiler")
    monkeypatch.setattr(sys.modules["dflash_jax.graph.resolve"], "library", lambda: found)
    return request.param


def resolved(pair: OpenPair, platform: str = "cpu", **choices: Any) -> dj.Plan:
    plan = pair.with_stored(dj.Plan(max_length=64, **choices))
    return resolve(plan, build_pair(*pair.configs), platform=platform, memory=1 << 40)


def test_blocks_stay_packed_by_default_where_there_are_kernels(mixed: Path, kernels: bool) -> None:
    pair = open_pair(mixed, None)
    assert resolved(pair).weights == ("packed" if kernels else "float")
    assert bool(resolved(pair).stored) == kernels
    assert resolved(pair, "gpu").weights == "packed"
    assert resolved(pair, "tpu").weights == "float"
    assert resolved(open_pair("tiny", None)).weights == "float"


def test_a_drafter_beside_packed_blocks_is_int8_with_native_kernels() -> None:
    """It decides nothing; its own blocks stay, and so do matrices that the file keeps as floats."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    blocks = (("target/layers_0/mlp/down", (1, (("Q8_0", 64),))),)

    def kinds(**choices: Any) -> dict[str, str]:
        stored = choices.pop("stored", blocks)
        plan = dj.Plan(weights="packed", stored=stored, max_length=64, **choices)
        specs = planned(target, drafter, plan).specs
        return {path: how[1][0][0] for path, how in specs.items()}

    native = kinds(kernels="native")
    of_target = {path for path in native if path.startswith("target")}
    assert of_target == {blocks[0][0]}
    assert native[blocks[0][0]] == "Q8_0"
    int8 = planned(target, drafter, dj.Plan(weights="int8", max_length=64)).specs
    expected = {path for path in int8 if path.startswith("drafter")}
    assert set(native) - of_target == expected
    assert {native[path] for path in expected} == {"int8"}
    own = ("drafter/fc", (1, (("Q4_0", 64),)))
    assert kinds(stored=(*blocks, own), kernels="native")["drafter/fc"] == "Q4_0"
    assert set(kinds(kernels="pallas")) == of_target


@pytest.mark.parametrize(
    "choices",
    [
        {"weights": "float"},
        {"kernels": "xla"},
        {"activations": "float"},
        {"mesh": (1, 2)},
    ],
)
def test_what_a_plan_asks_for_wins_over_packed_blocks(mixed: Path, choices: dict) -> None:
    assert resolved(open_pair(mixed, None), **choices).weights == "float"


def test_blocks_that_are_unpacked_are_named_once(
    tmp_path: Path, mixed: Path, kernels: bool
) -> None:
    """By type, unless floats were asked for."""

    def notes(kinds: dict[str, str], weights: str = "auto") -> list[str]:
        pair = open_pair(write(tmp_path / "x.gguf", kinds), None)
        found: list[str] = []
        plan = dj.Plan(weights=weights, max_length=64)
        dataclasses.replace(pair, report=found.append).planned(plan)
        return found

    assert notes(PARTLY, "float") == notes(GRIDS, "float") == []
    if kernels:
        assert notes(MIXED) == notes(PARTLY) == notes(GRIDS) == []
    else:
        assert "IQ1_M, IQ1_S, IQ2_S" in notes(GRIDS)[0]
        assert "in Q4_0, Q4_K, Q6_K, Q8_0 are unpacked" in notes(MIXED)[0]
        assert "in Q4_0, Q4_K, Q5_0, Q6_K, Q8_0 are unpacked" in notes(PARTLY)[0]


def test_an_engine_names_the_types_of_its_blocks(mixed: Path) -> None:
    plan = dj.Plan(max_length=64, chunk=16, block=4)
    packed, floats = (
        dj.load(mixed, None, plan=dataclasses.replace(plan, weights=weights))
        for weights in ("packed", "float")
    )
    assert "packed weights (Q4_0, Q4_K, Q6_K, Q8_0)" in repr(packed)
    assert repr(floats).endswith(", float32>")
