"""PEFT adapters, merged as peft itself merges them."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from gguf_models import Q, write_target
from weight_files import ORACLE

import dflash_jax as dj
from dflash_jax.cli import main
from dflash_jax.converters import live
from dflash_jax.converters.models import StoredModel, open_model
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.loading import open_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import stored

DATA = Path(__file__).parent / "data" / "adapters"
NAMES = sorted(p.name for p in DATA.iterdir())
TARGETS = ORACLE / "targets"
PATTERNS = "patterns.llama3"
TOKENS = 12
TOLERANCE = 2e-4  # of the oracle vectors, for logits up to 30
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def logits_of(model: StoredModel, base: str) -> np.ndarray:
    ids = safetensors.numpy.load_file(TARGETS / base / "vectors.safetensors")["input_ids"]
    target = TargetModel(model.config, model.load("float32"), "float32")
    return np.asarray(target.forward(ids[:1, :TOKENS]).logits)[0]


def adapter(place: Path, **fields: Any) -> Path:
    """A copy of an adapter with other fields in its config."""
    copy = place / "adapter"
    shutil.copytree(DATA / PATTERNS, copy)
    path = copy / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return copy


def with_tensors(place: Path, change: Any, name: str = PATTERNS) -> Path:
    """A copy of an adapter with other tensors."""
    copy = place / "adapter"
    shutil.copytree(DATA / name, copy)
    path = copy / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)
    return copy


def merged(lora: Path, base: str = "llama3") -> StoredModel:
    return open_model(TARGETS / base, lora=lora)


@pytest.mark.sample("embedding.qwen3")
@pytest.mark.parametrize("name", NAMES)
def test_a_merged_adapter_computes_the_logits_of_merge_and_unload(name):
    base = name.split(".")[1]
    expected = np.load(DATA / name / "logits.npy")
    ours = logits_of(merged(DATA / name, base), base)[-len(expected) :]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=1e-5)


def test_the_report_names_what_an_adapter_changed(tmp_path, capsys):
    done = main(
        ["convert", str(TARGETS / "llama3"), str(tmp_path / "out"), "--lora", str(DATA / PATTERNS)]
    )
    assert done == 0
    printed = capsys.readouterr().out
    assert "adapter of llama3: 9 matrices updated, 7 tensors replaced" in printed
    assert "tensors changed: adapter of rank 4 added" in printed
    expected = np.load(DATA / PATTERNS / "logits.npy")
    ours = logits_of(open_model(tmp_path / "out"), "llama3")[-len(expected) :]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=1e-5)


def test_a_checkpoint_and_a_quantised_file_take_adapters(tmp_path):
    base = str(TARGETS / "llama3")
    assert main(["convert", base, str(tmp_path / "checkpoint"), "--to", "orbax"]) == 0
    expected = merged(DATA / PATTERNS).load("float32")
    ours = open_model(tmp_path / "checkpoint", lora=DATA / PATTERNS).load("float32")
    np.testing.assert_allclose(
        ours["layers_0"]["mlp"]["down"], expected["layers_0"]["mlp"]["down"], atol=1e-6
    )
    plain = open_model(write_target(TARGETS / "llama3", tmp_path / "q8.gguf", Q.Q8_0))
    adapted = open_model(tmp_path / "q8.gguf", lora=DATA / PATTERNS)
    decoded, ours = plain.load("float32"), adapted.load("float32")
    added = (
        expected["layers_1"]["attention"]["qkv"]
        - open_model(base).load("float32")["layers_1"]["attention"]["qkv"]
    )
    np.testing.assert_allclose(
        ours["layers_1"]["attention"]["qkv"],
        decoded["layers_1"]["attention"]["qkv"] + added,
        atol=1e-5,
    )
    # Matrices of the adapter are floats, the others stay packed.
    kept, before = stored(adapted), stored(plain)
    assert {kind for kind, _ in before["layers_0/attention/qkv"][1]} == {"Q8_0"}
    assert [kind for kind, _ in kept["layers_0/attention/qkv"][1]] == ["", "Q8_0", ""]
    assert kept["layers_0/mlp/gate_up"] == before["layers_0/mlp/gate_up"]
    assert "layers_0/mlp/down" not in kept


def test_load_takes_an_adapter():
    base, lora = TARGETS / "llama3", DATA / PATTERNS
    pair = open_pair(base, None, lora=lora)
    assert any("9 matrices updated" in note for note in pair.target.notes)
    target = dj.load_target(base, lora=str(lora))
    ids = safetensors.numpy.load_file(base / "vectors.safetensors")["input_ids"][:1, :TOKENS]
    expected = np.load(lora / "logits.npy")
    ours = np.asarray(target.forward(ids).logits)[0, -len(expected) :]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=1e-5)


def test_embeddings_that_peft_saves_unchanged_are_ignored(tmp_path):
    weights = safetensors.numpy.load_file(TARGETS / "qwen3" / "model.safetensors")
    table = weights["model.embed_tokens.weight"]

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["base_model.model.lm_head.weight"] = table
        tensors["base_model.model.model.embed_tokens.base_layer.weight"] = table

    name = "all_linear.qwen3"
    expected = merged(DATA / name, "qwen3").load("float32")
    ours = merged(with_tensors(tmp_path, add, name), "qwen3").load("float32")
    np.testing.assert_array_equal(ours["head"], expected["head"])


def test_a_changed_table_of_a_tied_model_is_refused(tmp_path):
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["base_model.model.lm_head.weight"] = np.ones((256, 64), np.float32)

    with pytest.raises(CheckpointError, match="shares between embedding and head"):
        merged(with_tensors(tmp_path, add, "all_linear.qwen3"), "qwen3")


# Bad input.
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"use_dora": True}, "use_dora is True.*merge_and_unload"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_16"}, "also changes the base weights"),
        ({"use_something_new": {"a": 2}}, "does not understand: use_something_new"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 0}, "lacks 'r'"),
        ({"rank_pattern": {"(a*)*b": 2}}, "too complex"),
        ({"rank_pattern": {"a*b*c*d": 2}}, "too complex"),
        ({"alpha_pattern": {"(": 2}}, "is no pattern"),
        ({"alpha_pattern": {"q_proj": "2"}}, "q_proj is '2'; expected a finite number"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        merged(adapter(tmp_path, **fields))


def test_new_options_that_are_off_do_no_harm(tmp_path):
    merged(adapter(tmp_path, use_something_new=False, other_config=None, more={}))


def test_an_adapter_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match=r"the model's is \[.*another model \(llama3\)"):
        merged(DATA / PATTERNS, "qwen3")


def rename(tensors: dict[str, np.ndarray]) -> None:
    for which in "AB":
        tensors[f"base_model.model.model.layers.9.fc.lora_{which}.weight"] = tensors.pop(
            f"{Q_PROJ}.lora_{which}.weight"
        )


def one_missing(tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"{Q_PROJ}.lora_B.weight"]


def transposed(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q_PROJ}.lora_A.weight"] = tensors[f"{Q_PROJ}.lora_A.weight"].T.copy()


def other_rank(tensors: dict[str, np.ndarray]) -> None:
    for which, axis in (("A", 0), ("B", 1)):
        name = f"{Q_PROJ}.lora_{which}.weight"
        tensors[name] = tensors[name].take([0, 1], axis=axis)


def magnitudes(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q_PROJ}.lora_magnitude_vector"] = np.ones(64, np.float32)


def nothing(tensors: dict[str, np.ndarray]) -> None:
    for name in [n for n in tensors if ".lora_" in n]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"(?s)changes 1 tensors.*another model \(llama3\).*layers.9.fc.weight"),
        (one_missing, "q_proj has lora_A only"),
        (transposed, r"expected \[r, in\] and \[out, r\]"),
        (other_rank, "q_proj has rank 4, but its tensors have 2"),
        (magnitudes, "(?s)does not have.*lora_magnitude_vector"),
        (nothing, "holds no lora_A and lora_B"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        merged(with_tensors(tmp_path, change))


def test_a_folder_without_an_adapter_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json"):
        merged(tmp_path)
    shutil.copy(DATA / PATTERNS / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="is a pickle"):
        merged(tmp_path)
    with pytest.raises(CheckpointError, match="give its base model, and this folder as --lora"):
        open_model(DATA / PATTERNS)
    with pytest.raises(CheckpointError, match="there is no adapter at"):
        open_pair(TARGETS / "llama3", None, lora=tmp_path / "none" / "such")


def test_commands_refuse_an_adapter_that_does_not_exist(capsys):
    assert main(["generate", "hi", "--lora", "./no/such/adapter"]) == 1
    assert "there is no adapter at no/such/adapter" in capsys.readouterr().err


def test_live_weights_take_an_adapter_from_its_folder_and_from_memory() -> None:
    base = open_model(TARGETS / "llama3")
    arrays = live.to_arrays(base.load("float32"), base.config, naming="huggingface")
    expected = merged(DATA / PATTERNS).load("float32")
    fields = json.loads((DATA / PATTERNS / "adapter_config.json").read_text())
    factors = safetensors.numpy.load_file(DATA / PATTERNS / "adapter_model.safetensors")
    for lora in (DATA / PATTERNS, str(DATA / PATTERNS), (fields, factors)):
        found = live.from_arrays(arrays, base.config, lora=lora)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, expected)
    engine = dj.random_engine(base.config, plan=dj.Plan(max_length=32, weights="int8"))
    engine.update_params({"target": found})
    other = dj.random_engine(base.config, plan=dj.Plan(max_length=32, weights="int8"))
    other.update_params({"target": expected})
    jax.tree.map(np.testing.assert_array_equal, engine.params, other.params)


def test_live_adapters_that_do_not_fit_are_refused_by_name() -> None:
    base = open_model(TARGETS / "llama3")
    arrays = live.to_arrays(base.load("float32"), base.config, naming="huggingface")
    fields = json.loads((DATA / PATTERNS / "adapter_config.json").read_text())
    factors = safetensors.numpy.load_file(DATA / PATTERNS / "adapter_model.safetensors")
    wrong = factors | {f"{Q_PROJ}.lora_A.weight": np.ones((4, 3), np.float32)}
    for lora, error, message in (
        ((fields, wrong), CheckpointError, "the adapter belongs to another model"),
        ((fields, {}), CheckpointError, "the arrays that were given holds no lora_A"),
        ((fields | {"use_dora": True}, factors), ConfigError, "adapter's config: use_dora is True"),
        ((5, factors), ConfigError, "the adapter's config is 5; expected its fields"),
        ("missing", CheckpointError, "missing holds no adapter_config.json"),
    ):
        with pytest.raises(error, match=message):
            live.from_arrays(arrays, base.config, lora=lora)


def test_packed_weights_of_another_file_of_the_same_types_take_the_place_of_an_engines(
    tmp_path: Path,
) -> None:
    path = write_target(TARGETS / "llama3", tmp_path / "q8.gguf", Q.Q8_0)
    plan = dj.Plan(max_length=32, weights="packed")
    engine, other = (dj.load(path, None, plan=plan) for _ in range(2))
    first = engine.generate([1, 2, 3], max_tokens=8).token_ids
    tree = other.params["target"] | {"norm": other.params["target"]["norm"] * -1}
    engine.update_params({"target": tree})
    assert engine.generate([1, 2, 3], max_tokens=8).token_ids != first
    engine.update_params({"target": other.params["target"]})
    assert engine.generate([1, 2, 3], max_tokens=8).token_ids == first
