"""Checkpoints and parameters of MaxText and of Gemma's library, against their own logits."""

import functools
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax import CheckpointError, ConfigError, DFlashError, Plan, TargetModel
from dflash_jax.checkpoint import read_arrays, read_leaves, write_arrays
from dflash_jax.cli import main as command
from dflash_jax.converters import live
from dflash_jax.converters.cli import main
from dflash_jax.converters.convert import convert
from dflash_jax.converters.inspect import inspect
from dflash_jax.converters.models import open_model
from dflash_jax.converters.tree_source import leaf
from dflash_jax.families.configs import target_config

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA = SIZES | {"model_type": "llama", "rope_theta": 5e5}
QWEN3 = SIZES | {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True}
GEMMA3 = SIZES | {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "tie_word_embeddings": True,
}
GEMMA3.pop("hidden_act")
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FIELDS: dict[str, dict[str, Any]] = {
    "maxtext/llama3": LLAMA,
    "maxtext/llama3_scanned": LLAMA,
    "maxtext/llama3_1_scanned": LLAMA | {"rope_scaling": SCALED},
    "maxtext/mistral_scanned": SIZES
    | {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
    "maxtext/qwen2": SIZES | {"model_type": "qwen2", "rope_theta": 1e4},
    "maxtext/qwen3": QWEN3,
    "maxtext/qwen3_scanned": QWEN3,
    "maxtext/gemma3": GEMMA3,
    "maxtext/gemma3_scanned": GEMMA3,
    "gemma/gemma3": GEMMA3,
    "gemma/gemma3_all_heads": GEMMA3 | {"num_key_value_heads": 4},
}
CONFIGS = {name: target_config(dict(fields)) for name, fields in FIELDS.items()}


@pytest.fixture(params=FIELDS)
def named(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def arrays(named: str, oracle: Path) -> dict[str, np.ndarray]:
    """Parameters by path, tokens and logits, as the library wrote them."""
    return load_file(oracle / f"{named}.safetensors")


@pytest.mark.sample("maxtext/llama3_scanned")
def test_logits_equal_those_of_the_library(named: str, arrays: dict[str, np.ndarray]) -> None:
    config, tokens, logits = CONFIGS[named], arrays.pop("tokens"), arrays.pop("logits")
    variables = live.nested(arrays)
    state = {"params": variables, "opt_state": [{"mu": variables}, None], "step": 3}
    for given in (variables, variables.get("params", variables), state):
        params = live.from_arrays(given, config)
        found = TargetModel(config, params, "float32").forward(tokens).logits
        np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)


def test_both_directions_are_inverse(named: str, arrays: dict[str, np.ndarray]) -> None:
    config, library = CONFIGS[named], named.partition("/")[0]
    del arrays["tokens"], arrays["logits"]
    variables = live.nested(arrays)
    params = live.from_arrays(variables, config)
    own: Any = f"{library}_scanned" if named.endswith("scanned") else library
    back = live.to_arrays(params, config, naming=own)
    assert jax.tree.structure(back) == jax.tree.structure(variables)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, back, variables)
    other = live.to_arrays(params, config, naming="maxtext_scanned")
    jax.tree.map(close, live.from_arrays(other, config), params)


@pytest.fixture
def folder(tmp_path: Path, oracle: Path) -> Path:
    """A checkpoint that MaxText's manager wrote, with the configuration of its model."""
    place = tmp_path / "checkpoint"
    shutil.copytree(oracle / "maxtext" / "checkpoint", place)
    (place / "config.json").write_text(json.dumps(FIELDS["maxtext/llama3_scanned"]))
    return place


@pytest.mark.exhaustive
def test_a_checkpoint_of_maxtext_loads_drafts_and_verifies(folder: Path, oracle: Path) -> None:
    vectors = load_file(oracle / "maxtext" / "llama3_scanned.safetensors")
    for place in (folder, moved(folder / "0", folder), moved(folder / "0" / "items", folder)):
        found = dj.load_target(place).forward(vectors["tokens"]).logits
        np.testing.assert_allclose(found, vectors["logits"], rtol=0, atol=1e-4)
    engine = dj.load(folder, "ngram", plan=Plan(max_length=96, chunk=16))
    engine.measures_drafting = False
    options: Any = {"max_tokens": 64, "ignore_eos": True}
    drafted = engine.generate([1, 2, 3, 1, 2], **options)
    plain = engine.generate([1, 2, 3, 1, 2], speculative=False, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted


def moved(place: Path, configured: Path) -> Path:
    """Return a part of a checkpoint with a configuration of its own."""
    shutil.copy(configured / "config.json", place)
    return place


def test_a_checkpoint_of_maxtext_is_converted_without_change(folder: Path, tmp_path: Path) -> None:
    report = convert(open_model(folder), tmp_path / "hf")
    assert report["layout"] == "MaxText (orbax)"
    changes = {row["tensor"]: row["change"] for row in report["tensors"] if row["change"]}
    assert changes == {
        f"layers.{i}.self_attn.q_proj.weight": "queries: times sqrt(head width)" for i in (0, 1)
    }
    found, params = open_model(tmp_path / "hf").load("float32"), open_model(folder).load("float32")
    jax.tree.map(np.testing.assert_array_equal, found, params)
    names = {tensor["name"] for tensor in inspect(folder)["tensors"]}
    assert "params/params/decoder/layers/mlp/wo/kernel" in names


@pytest.mark.exhaustive
@pytest.mark.parametrize("naming", ["maxtext", "maxtext_scanned"])
def test_a_model_is_written_as_a_checkpoint_of_maxtext(
    naming: str, tmp_path: Path, oracle: Path
) -> None:
    """Where its manager looks for step 0, with the arrays of its own checkpoint."""
    for name in (x for x in FIELDS if x.startswith("maxtext/")):
        place, again, back = (tmp_path / f"{name[8:]}{x}" for x in ("", ".maxtext", ".hf"))
        arrays = load_file(oracle / f"{name}.safetensors")
        tokens, logits = arrays.pop("tokens"), arrays.pop("logits")
        leaves = {("params", *path.split("/")): array for path, array in arrays.items()}
        place.mkdir()
        write_arrays(place / "items", leaves)
        (place / "config.json").write_text(json.dumps(FIELDS[name]))
        report = convert(open_model(place), again, to=naming)
        assert json.loads((again / "conversion.json").read_text()) == report
        found = read_leaves(again / "0" / "items")
        if naming.endswith("scanned") == name.endswith("scanned"):
            assert {k: x.shape for k, x in found.items()} == {k: x.shape for k, x in leaves.items()}
            written = read_arrays(again / "0" / "items", dict.fromkeys(found))
            for keys, array in leaves.items():
                close = {"rtol": 1e-6, "atol": 1e-6, "err_msg": "/".join(keys)}
                np.testing.assert_allclose(leaf(written, keys), array, **close)
        ours = dj.load_target(again).forward(tokens).logits
        np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-4)
        convert(open_model(again), back)
        assert open_model(back).config == open_model(again).config


def test_an_array_is_made_in_its_place_a_few_rows_at_a_time(
    tmp_path: Path, oracle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where values are converted: Gemma's table is divided by the root of its width."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    source = tmp_path / "large"
    shutil.copytree(oracle / "targets" / "gemma3", source)
    fields = json.loads((source / "config.json").read_text()) | {"vocab_size": 100_000}
    (source / "config.json").write_text(json.dumps(fields))
    tensors = load_file(source / "model.safetensors")
    table = np.ones((100_000, fields["hidden_size"]), np.float32)
    save_file(tensors | {"model.embed_tokens.weight": table}, source / "model.safetensors")
    model = open_model(source)
    tracemalloc.start()
    convert(model, tmp_path / "out", to="maxtext")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * table.nbytes


def save_nnx(place: Path, arrays: Any) -> None:
    """Save arrays as an NNX state, as the managers of Tunix and MaxText do."""
    state = nnx.State(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), arrays))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(place, args=ocp.args.PyTreeSave(state))


@pytest.mark.sample("model")
@pytest.mark.parametrize("prefix", ["", "base", "model"])
def test_an_nnx_state_of_maxtext_loads(prefix: str, tmp_path: Path, oracle: Path) -> None:
    arrays = load_file(oracle / "maxtext" / "qwen3_scanned.safetensors")
    tokens, logits = arrays.pop("tokens"), arrays.pop("logits")
    tree = live.nested(arrays)["params"]
    tree["decoder"]["dropout"] = {"rngs": {"count": np.uint32(3)}}
    save_nnx(tmp_path / "nnx" / "0" / "items", {prefix: tree} if prefix else tree)
    (tmp_path / "nnx" / "config.json").write_text(json.dumps(FIELDS["maxtext/qwen3_scanned"]))
    found = dj.load_target(tmp_path / "nnx").forward(tokens).logits
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)


def test_a_model_is_written_as_a_checkpoint_of_tunix(tmp_path: Path, oracle: Path) -> None:
    arrays = load_file(oracle / "tunix" / "qwen3.safetensors")
    tokens, logits = arrays.pop("tokens"), arrays.pop("logits")
    place, again = tmp_path / "tunix", tmp_path / "again"
    save_nnx(place / "3" / "model_params", live.nested(arrays))
    fields = FIELDS["maxtext/qwen3"] | {"tie_word_embeddings": False}
    (place / "config.json").write_text(json.dumps(fields))
    assert open_model(place).layout == "Tunix (orbax)"
    report = convert(open_model(place), again, to="tunix")
    assert not any(row["change"] for row in report["tensors"])
    stored, found = (read_leaves(x / "model_params") for x in (place / "3", again / "0"))
    assert found == stored
    written = read_arrays(again / "0" / "model_params", dict.fromkeys(found))
    for keys in found:
        np.testing.assert_array_equal(leaf(written, keys), arrays["/".join(keys[:-1])])
    ours = dj.load_target(again).forward(tokens).logits
    np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-4)


@pytest.mark.sample("maxtext")
@pytest.mark.parametrize("library", ["gemma", "maxtext", "tunix"])
def test_a_checkpoint_of_every_library_is_drafted_for_and_verified(
    library: str, folder: Path, tmp_path: Path, oracle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if library == "gemma":
        folder = tmp_path / "gemma"
        shutil.copytree(oracle / "gemma" / "checkpoint", folder)
        (folder / "config.json").write_text(json.dumps(FIELDS["gemma/gemma3_all_heads"]))
    elif library == "tunix":
        convert(open_model(folder), tmp_path / "tunix", to="tunix")
        folder = tmp_path / "tunix"
    ids, model = "7,3,11,7,3,11,7,3", ["--target", str(folder), "--drafter", "ngram"]
    asked = ["--prompt-ids", ids, "--max-length", "96", "--chunk", "16", "--ignore-eos"]
    assert command(["verify", *model, *asked]) == 0
    assert "speculative equals plain" in capsys.readouterr().out


def test_what_a_library_cannot_hold_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, oracle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, to, message in (
        ("targets/gpt_oss", "maxtext", "MaxText's parameters of a gpt_oss target are not"),
        ("targets/gemma3", "tunix", "Tunix's parameters of a gemma3_text target are not"),
        ("variants/llama_biases_dynamic", "tunix", "Tunix has no name for layers.0.self_attn"),
        ("drafters/v1_full", "maxtext_scanned", "is a drafter, and maxtext_scanned a layout of"),
    ):
        assert main(["convert", str(oracle / source), str(tmp_path / "x"), "--to", to]) == 1
        assert message in capsys.readouterr().err
    large = {k: x * 1e6 for k, x in load_file(oracle / "targets/llama3/model.safetensors").items()}
    shutil.copytree(oracle / "targets" / "llama3", tmp_path / "large")
    save_file(large, tmp_path / "large" / "model.safetensors")
    for to, dtype, message in (
        ("tunix", "float16", "float16"),
        ("maxtext", "q8_0", "dtype 'q8_0' is not one of float32"),
    ):
        given = [str(tmp_path / "large"), str(tmp_path / "x"), "--to", to, "--dtype", dtype]
        assert main(["convert", *given]) == 1
        assert message in capsys.readouterr().err
    assert {x.name for x in tmp_path.iterdir()} == {"checkpoint", "large"}


@pytest.mark.exhaustive
def test_a_published_checkpoint_of_gemma_loads(tmp_path: Path, oracle: Path) -> None:
    """They are flat, with the path of a module in one name."""
    fields = FIELDS["gemma/gemma3_all_heads"]
    place = tmp_path / "checkpoint"
    shutil.copytree(oracle / "gemma" / "checkpoint", place)
    (place / "config.json").write_text(json.dumps(fields))
    vectors = load_file(oracle / "gemma" / "gemma3_all_heads.safetensors")
    assert open_model(place).layout == "Gemma (orbax)"
    target = dj.load_target(place)
    found = target.forward(vectors["tokens"]).logits
    np.testing.assert_allclose(found, vectors["logits"], rtol=0, atol=1e-4)
    convert(open_model(place), tmp_path / "hf")
    again = open_model(tmp_path / "hf").load("float32")
    jax.tree.map(np.testing.assert_array_equal, again, target.params)
    for changes, message in (
        ({"num_hidden_layers": 9}, "missing: transformer/layer_8/attn/qkv_einsum/w"),
        ({"num_hidden_layers": 7}, "left over: layer_7/attn/qkv_einsum/w"),
        ({"num_key_value_heads": 2}, "missing: transformer/layer_0/attn/q_einsum/w"),
        ({"vocab_size": 64}, r"input_embedding is \[61, 16\], expected \[64, 16\]"),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not a target"),
    ):
        (place / "config.json").write_text(json.dumps(fields | changes))
        with pytest.raises(DFlashError, match=message):
            convert(open_model(place), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_last_of_several_steps_is_read_and_named(folder: Path) -> None:
    shutil.copytree(folder / "0", folder / "12")
    shutil.copytree(folder / "0", folder / "3.orbax-checkpoint-tmp")
    assert open_model(folder).notes == ("step 12, the last of 2",)


def test_what_a_training_run_adds_is_left_out(folder: Path, oracle: Path) -> None:
    vectors = load_file(oracle / "maxtext" / "llama3_scanned.safetensors")
    tokens, logits = vectors.pop("tokens"), vectors.pop("logits")
    items = folder / "0" / "items"
    shutil.rmtree(items)
    leaves = {("params", *path.split("/")): array for path, array in vectors.items()}
    moments = {("opt_state", "mu", *path): np.full_like(x, np.nan) for path, x in leaves.items()}
    write_arrays(items, {**leaves, **moments, ("step",): np.int32(7)})
    model = open_model(folder)
    assert set(model.tensors.ignored.values()) == {"not among the model's parameters"}
    params = model.load("float32")
    found = TargetModel(CONFIGS["maxtext/llama3_scanned"], params, "float32").forward(tokens).logits
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_hidden_layers": 3},
            r"layers/mlp/wo/kernel is \[24, 2, 16\], expected \[24, 3, 16\], 3 layers of them",
        ),
        ({"intermediate_size": 25}, r"wi_0/kernel is \[16, 2, 24\], expected \[16, 2, 25\]"),
        ({"model_type": "qwen3"}, "missing: params/params/decoder/layers/.*/query_norm/scale"),
        ({"tie_word_embeddings": True}, "left over: decoder/logits_dense/kernel"),
        ({"model_type": "granite"}, "MaxText's parameters of a granite target are not converted"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not a target"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps(FIELDS["maxtext/llama3_scanned"] | fields))
    with pytest.raises(DFlashError, match=message):
        convert(open_model(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Reads that orbax had started besides the failed one end after its event loop was closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_and_unknown_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"without its configuration; put the\s+model's"):
        open_model(folder)
    (folder / "config.json").write_text(json.dumps(FIELDS["maxtext/llama3_scanned"]))
    data = max((folder / "0" / "items").rglob("*"), key=lambda p: p.is_file() * p.stat().st_size)
    data.write_bytes(b"x" + data.read_bytes()[1:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(open_model(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(folder / "0")
    write_arrays(folder / "items", {("encoder", "w"): np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"none of Gemma, MaxText, Tunix: it holds encoder/w"):
        open_model(folder)


def test_arrays_of_another_type_are_refused(oracle: Path) -> None:
    arrays = load_file(oracle / "maxtext" / "qwen3.safetensors")
    config, path = CONFIGS["maxtext/qwen3"], "params/decoder/layers_1/mlp/wo/kernel"
    arrays = {name: x for name, x in arrays.items() if name not in ("tokens", "logits")}
    with pytest.raises(CheckpointError, match=r"wrong type: layers\.1\.mlp\.\S+ holds int8"):
        live.from_arrays(live.nested(arrays | {path: arrays[path].astype(np.int8)}), config)
    without = {name: x for name, x in arrays.items() if name != path}
    with pytest.raises(CheckpointError, match=f"missing: {path}, which is layers.1.mlp.down_proj"):
        live.from_arrays(live.nested(without), config)
    more = arrays | {path.replace("layers_1", "layers_2"): arrays[path]}
    with pytest.raises(CheckpointError, match="left over: decoder/layers_2/mlp/wo/kernel"):
        live.from_arrays(live.nested(more), config)
    with pytest.raises(ConfigError, match="float64"):
        live.from_arrays(live.nested(arrays), config, dtype="float64")
