"""Domino: the correction against NumPy, alignment, and the layouts of its makers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from safetensors import safe_open
from safetensors.numpy import save_file

from dflash_jax import Plan
from dflash_jax.converters import export
from dflash_jax.converters.models import open_model
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import ConfigError
from dflash_jax.families.configs import drafter_config
from dflash_jax.families.domino import DominoConfig
from dflash_jax.graph.protocols import SharedLayers
from dflash_jax.graph.state import idle_rules
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.networks import build_drafter, build_pair
from dflash_jax.testing import planned, random_params, tiny_drafter, tiny_target

TARGET = tiny_target(num_layers=2)
PLAN = Plan(max_length=32, block=6, chunk=8, dtype="float32")
ANCHOR, START, PLACES = jnp.asarray([5]), jnp.asarray([0]), 5
TABLE = jax.random.normal(jax.random.key(1), (97, 32))
LAYERS = SharedLayers(lambda ids: TABLE[ids], lambda h: jnp.einsum("btd,vd->btv", h, TABLE))
PUBLISHED: dict[str, Any] = {  # as of Huang2020/Qwen3-4B-Domino-b16, with small sizes
    "architectures": ["DominoDraftModel"],
    "auto_map": {"AutoModel": "domino.DominoDraftModel"},
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 97,
    "block_size": 8,
    "emb_dim": 8,
    "num_target_layers": 2,
    "dflash_config": {
        "projector_type": "domino",
        "mask_token_id": 96,
        "target_layer_ids": [0],
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 12,
        "emb_dim": 8,
    },
}


def make(**changes: Any) -> tuple[DominoConfig, dict[str, Any]]:
    config = tiny_drafter(TARGET, "domino", target_layer_ids=(0,), **changes)
    assert isinstance(config, DominoConfig)
    return config, jax.device_put(random_params(build_pair(TARGET, config), seed=2)["drafter"])


def run(config: DominoConfig, params: dict[str, Any], method: Any, *args: Any) -> Any:
    caches = planned(TARGET, config, PLAN).empty_state().drafter
    module: Any = build_drafter(config)
    given = (caches, ANCHOR, START, LAYERS, *args)

    def apply(params: dict[str, Any]) -> Any:
        return module.apply({"params": params}, *given, method=method)

    return jax.jit(apply)(params)


@struct.dataclass
class Recorded:
    """Arguments of `RowDraftSampler.draft`."""

    tokens: Any
    finite: Any
    confidence: Any = None


class Recorder(RowDraftSampler):
    """A sampler whose `draft` returns its arguments."""

    def draft(self, tokens: Any, finite: Any, **more: Any) -> Any:
        return Recorded(tokens, finite, more.get("confidence"))


def propose(config: DominoConfig, params: dict[str, Any]) -> list[int]:
    rules = idle_rules(PLAN)
    sampler = Recorder(rules, ANCHOR, START, PLACES, False, config.vocab_size, "xla")
    return run(config, params, "propose", sampler)[0].tokens[0].tolist()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.sample("3-False")
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("pure", [0, 1, 3])
def test_the_correction_follows_its_formulas(pure: int, shifted: bool) -> None:
    """The state has read the anchor and all drafts before a place, whichever the alignment."""
    config, params = make(
        pure_draft_prefix_len=pure, sample_from_anchor=shifted, input_embedding_scale=2.0
    )
    w = {k: np.asarray(v, np.float64) for k, v in params.items() if not isinstance(v, dict)}
    w["correction_out"] = 30 * w["correction_out"]  # so that it decides
    params["correction_out"] = 30 * params["correction_out"]
    hidden, logits = (
        np.asarray(x[0], np.float64) for x in run(config, params, "predict", PLACES)[:2]
    )
    token, state, expected = int(ANCHOR[0]), np.zeros(12), []
    for k in range(PLACES):
        from_x = np.split(2.0 * np.asarray(TABLE[token], np.float64) @ w["gru_input"], 3)
        from_state = np.split(state @ w["gru_state"], 3)
        reset, keep = (sigmoid(from_x[i] + from_state[i]) for i in (0, 1))
        new = np.tanh(from_x[2] + reset * from_state[2])
        state = (1 - keep) * new + keep * state
        inner = np.concatenate([hidden[k], state]) @ w["correction_in"]
        added = (inner * sigmoid(inner)) @ w["correction_out"]
        token = int(np.argmax(logits[k] + (added if k >= pure else 0)))
        expected.append(token)
    assert propose(config, params) == expected
    assert expected != np.argmax(logits, axis=-1).tolist()


def stored(config: DominoConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    source = TreeSource(jax.tree.map(np.asarray, params), config)
    return {name: source.read(name) for name in source.names()}


def folder(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("prefix", ["", "logit_head."])
def test_published_folders_load_and_are_written_again(tmp_path: Path, prefix: str) -> None:
    config, params = make(windows=(None, None), causal=(False, False))
    tensors = {
        prefix * name.startswith(("prefix_gru", "embed_proj")) + name: array
        for name, array in stored(config, params).items()
    }
    assert tensors[f"{prefix}prefix_gru.weight_hh_l0"].shape == (36, 12)
    assert tensors[f"{prefix}embed_proj.2.weight"].shape == (97, 8)
    model = open_model(folder(tmp_path / "one", PUBLISHED, tensors), role="drafter")
    assert model.config == config
    jax.tree.map(np.testing.assert_array_equal, model.load("float32"), params)
    weights = export.Weights(model.config, model.tensors)
    export.export(weights, tmp_path / "again", layout="huggingface", dtype="float32")
    again = open_model(tmp_path / "again")
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.load("float32"), params)
    with pytest.raises(ConfigError, match="no form in GGUF"):
        export.export(weights, tmp_path / "no.gguf", layout="gguf", dtype="float32")
    assert not (tmp_path / "no.gguf").exists()


def test_speculators_folders_have_names_of_their_own(tmp_path: Path) -> None:
    """Its own copies of the target's embedding and head are not needed."""
    config, params = make(windows=(None, None), causal=(False, False), num_target_layers=0)
    source = TreeSource(jax.tree.map(np.asarray, params), config)
    path = tmp_path / "written"
    export.export(export.Weights(config, source), path, layout="speculators", dtype="float32")
    fields = json.loads((path / "config.json").read_text())
    assert fields["architectures"] == ["DominoSpeculator"]
    assert fields["speculators_model_type"] == "domino"
    assert (fields["logits_correction_emb_dim"], fields["gru_hidden_dim"]) == (8, 12)
    assert fields["sample_from_anchor"] is True
    assert "emb_dim" not in fields
    with safe_open(path / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name for name in tensors if name.startswith("logits_correction.")} == {
        f"logits_correction.{name}"
        for name in (
            "prefix_gru.weight_ih_l0",
            "prefix_gru.weight_hh_l0",
            "embed_proj.0.weight",
            "embed_proj.2.weight",
        )
    }
    tensors |= {f"{name}.weight": np.asarray(TABLE) for name in ("embed_tokens", "lm_head")}
    model = open_model(folder(tmp_path / "copies", fields, tensors), role="drafter")
    assert dataclasses.replace(model.config, rope=config.rope) == config  # its length is given
    jax.tree.map(np.testing.assert_array_equal, model.load("float32"), params)


def test_configs_of_specforge_mean_the_same_and_sizes_are_not_guessed() -> None:
    plain = drafter_config(PUBLISHED)
    assert plain == make(windows=(None, None), causal=(False, False))[0]
    assert drafter_config(PUBLISHED | {"architectures": ["DFlashDraftModel"]}) == plain
    for name in ("gru_hidden_dim", "pure_draft_prefix_len"):
        own = {k: v for k, v in PUBLISHED["dflash_config"].items() if k != name}
        with pytest.raises(ConfigError, match=name):
            drafter_config(PUBLISHED | {"dflash_config": own})
    with pytest.raises(ConfigError, match="gru_hidden_dim is 0"):
        drafter_config(
            PUBLISHED | {"dflash_config": PUBLISHED["dflash_config"] | {"gru_hidden_dim": 0}}
        )
