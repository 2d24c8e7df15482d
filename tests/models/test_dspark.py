"""DSpark: alignment, Markov heads and confidence against NumPy; reduced vocabularies."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import struct
from safetensors.numpy import save_file

from dflash_jax import Plan, families
from dflash_jax.config import DrafterConfig
from dflash_jax.converters import export
from dflash_jax.converters.models import open_model
from dflash_jax.converters.names import speculators
from dflash_jax.converters.names.published import drafter_fields
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import drafter_config
from dflash_jax.families.dspark import DSparkConfig
from dflash_jax.graph.protocols import SharedLayers
from dflash_jax.graph.state import idle_rules
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.networks import build_drafter, build_pair
from dflash_jax.testing import planned, random_params, tiny_drafter, tiny_target

TARGET = tiny_target(num_layers=2)
PLAN = Plan(max_length=32, block=6, chunk=8, dtype="float32")
BLOCK = jnp.asarray([[5, *[96] * 5]])
PLACES = BLOCK.shape[1] - 1
START = jnp.asarray([0])
TABLE = jax.random.normal(jax.random.key(1), (97, 32))
LAYERS = SharedLayers(lambda ids: TABLE[ids], lambda h: jnp.einsum("btd,vd->btv", h, TABLE))


def make(**changes: Any) -> tuple[DrafterConfig, dict[str, Any]]:
    config = tiny_drafter(TARGET, "dspark", target_layer_ids=(0,), **changes)
    return config, jax.device_put(random_params(build_pair(TARGET, config), seed=2)["drafter"])


def run(config: DrafterConfig, params: dict[str, Any], method: Any, *args: Any) -> Any:
    caches = planned(TARGET, config, PLAN).empty_state().drafter
    module: Any = build_drafter(config)
    given = (caches, BLOCK[:, 0], START, LAYERS, *args)

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


def propose(config: DrafterConfig, params: dict[str, Any]) -> Any:
    vocab = config.vocab_size
    sampler = Recorder(idle_rules(PLAN), BLOCK[:, 0], START, PLACES, False, vocab, "xla")
    return run(config, params, "propose", sampler)[0]


def backbone(config: DrafterConfig, params: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return hidden states and base logits of the drafted positions."""
    hidden, logits, _ = run(config, params, "predict", PLACES)
    return np.asarray(hidden)[0], np.asarray(logits)[0]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_heads_follow_their_formulas(kind: str) -> None:
    config, params = make(markov_head=kind)
    hidden, logits = backbone(config, params)
    found = propose(config, params)
    w = {k: np.asarray(v, np.float64) for k, v in params.items() if not isinstance(v, dict)}
    previous, state, confidence = 5, np.zeros(8), 1.0
    for k in range(5):  # slot k holds the anchor or a mask, and predicts the next token
        e, h = w["markov_w1"][previous], hidden[k].astype(np.float64)
        if kind == "vanilla":
            bias = e @ w["markov_w2"]
        elif kind == "gated":
            gate = sigmoid(np.concatenate([h, e]) @ w["markov_gate"] + w["markov_gate_bias"])
            bias = (gate * e) @ w["markov_w2"]
        else:
            joined = np.concatenate([state, e, h]) @ w["markov_joint"] + w["markov_joint_bias"]
            keep, new, out = np.split(joined, 3)
            state = sigmoid(keep) * state + (1 - sigmoid(keep)) * np.tanh(new)
            bias = np.tanh(out) @ w["markov_w2"]
        read = np.concatenate([h, e])
        confidence *= sigmoid(read @ w["confidence"] + w["confidence_bias"])[0]
        np.testing.assert_allclose(found.confidence[0, k], confidence, atol=1e-5)
        previous = int(np.argmax(logits[k] + bias))
        assert found.tokens[0, k] == previous


def test_slot_k_predicts_the_token_after_it() -> None:
    """Slots are the anchor and four masks; without bias, the draft is their argmax."""
    config, params = make(confidence_head=False)
    params["markov_w2"] = params["markov_w2"] * 0
    v1 = tiny_drafter(TARGET, target_layer_ids=(0,))
    kept = {k: v for k, v in params.items() if not k.startswith("markov")}
    caches = planned(TARGET, v1, PLAN).empty_state().drafter
    hidden, _ = build_drafter(v1).apply({"params": kept}, LAYERS.embed(BLOCK[:, :5]), caches, START)
    expected = np.argmax(LAYERS.head(hidden), axis=-1)
    np.testing.assert_array_equal(propose(config, params).tokens, expected)
    bare, _ = make(markov_rank=0, confidence_head=False)
    np.testing.assert_array_equal(propose(bare, kept).tokens, expected)


def test_drafts_of_a_reduced_vocabulary_are_target_tokens() -> None:
    config, params = make(draft_vocab_size=40, own_head=True, own_embedding=True)
    offsets = np.sort(np.random.default_rng(0).choice(97, 40, replace=False)) - np.arange(40)
    params["d2t"] = jnp.asarray(offsets, jnp.int32)
    _, logits = backbone(config, params)
    assert logits.shape == (5, 40)
    found = propose(config, params)
    assert set(np.asarray(found.tokens)[0]) <= set((np.arange(40) + offsets).tolist())
    e = np.asarray(params["markov_w1"])[5]
    first = np.argmax(logits[0] + e @ np.asarray(params["markov_w2"]))
    assert found.tokens[0, 0] == first + offsets[first]


def published_config(config: DSparkConfig) -> dict[str, Any]:
    fields = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 97,
        "block_size": 7,
        "mask_token_id": 96,
        "target_layer_ids": [0],
        "num_anchors": 512,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    return fields


def layer_config(config: DSparkConfig) -> dict[str, Any]:
    """Return the layer config that speculators nests."""
    heads = ("markov", "confidence", "anchors", "block_size", "mask_token", "target_layer")
    return {
        k: v for k, v in published_config(config).items() if not any(part in k for part in heads)
    }


def stored(config: DrafterConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    source = TreeSource(jax.tree.map(np.asarray, params), config)
    return {name: source.read(name) for name in source.names()}


SPELLINGS = {
    "DeepSpec": {},
    "older": {"markov_head.": "logit_head."},
    "ModelOpt": {
        "markov_head.markov_w1.weight": "markov_w1",
        "markov_head.markov_w2.weight": "markov_w2",
        "markov_head.gate_proj.": "gate_proj.",
        "confidence_head.proj.": "confidence_proj.",
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_folders_load_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    config, params = make(markov_head="gated", own_embedding=True, own_head=True)
    assert isinstance(config, DSparkConfig)
    tensors = stored(config, params)
    for usual, other in SPELLINGS[spelling].items():
        tensors = {name.replace(usual, other): array for name, array in tensors.items()}
    fields = published_config(config)
    if spelling == "ModelOpt":
        own = ("markov_rank", "markov_head_type", "confidence_head_with_markov")
        inner = {name: fields.pop(name) for name in own} | {"projector_type": "dspark"}
        inner["use_confidence_head"] = fields.pop("enable_confidence_head")
        fields |= {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = open_model(tmp_path, role="drafter")
    assert isinstance(model.config, DSparkConfig)
    assert model.config.block_size == 7
    assert (model.config.own_embedding, model.config.own_head) == (True, True)
    jax.tree.map(np.testing.assert_array_equal, model.load("float32"), params)
    weights = export.Weights(model.config, model.tensors)
    export.export(weights, tmp_path / "again", layout="huggingface", dtype="float32")
    assert open_model(tmp_path / "again").config == model.config


def test_configs_of_specforge_and_modelopt_mean_the_same() -> None:
    """Weights of losses are ignored; `shift_label` sets which position a slot predicts."""
    config, _ = make()
    assert isinstance(config, DSparkConfig)
    fields = published_config(config)
    plain, kinds = drafter_config(fields), {"architectures": ["DSparkDraftModel"]}
    heads = {k: fields.pop(k) for k in tuple(fields) if "markov" in k or "confidence" in k}
    losses = {"confidence_head_alpha": 1.0, "ce_loss_alpha": 0.1, "loss_decay_gamma": 4.0}
    separate = {"dspark_config": heads, "dflash_config": {"projector_type": "dspark"}}
    assert drafter_config(fields | {"dflash_config": heads | losses} | kinds) == plain
    assert drafter_config(fields | separate | {"model_type": "dspark"}) == plain
    for shifted in (True, False):
        found = drafter_config(fields | {"dflash_config": heads | {"shift_label": shifted}})
        assert found == dataclasses.replace(plain, sample_from_anchor=shifted)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_speculators_folders_with_a_reduced_vocabulary(tmp_path: Path, kind: str) -> None:
    """A separate head, ids as offsets, taps one higher; an unfilled table is the target's."""
    config = tiny_drafter(TARGET, kind, target_layer_ids=(0,), draft_vocab_size=40, own_head=True)
    params = random_params(build_pair(TARGET, config))["drafter"]
    params["d2t"] = np.sort(np.random.default_rng(0).choice(97, 40, False)) - np.arange(40)
    tensors = stored(config, params) | {
        "t2d": np.zeros(97, bool),
        "embed_tokens.weight": np.full((97, 32), np.nan, np.float32),
    }
    layers = layer_config(tiny_drafter(TARGET, "dspark"))  # pyrefly: ignore[bad-argument-type]
    layers |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
    own = {"markov_rank": 8, "enable_confidence_head": True} if kind == "dspark" else {}
    fields = own | {
        "speculators_model_type": kind,
        "transformer_layer_config": layers | {"use_sliding_window": True},
        "draft_vocab_size": 40,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [1],
        "mask_token_id": 96,
        "sample_from_anchor": kind == "dspark",
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = open_model(tmp_path)
    assert isinstance(model.config, DrafterConfig)
    assert (model.config.draft_vocab_size, model.config.target_layer_ids) == (40, (0,))
    assert model.config.causal == (True, False)
    loaded = model.load("bfloat16")
    assert (loaded["d2t"].dtype, loaded["head"].dtype) == (np.int32, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(loaded["d2t"], params["d2t"])
    np.testing.assert_array_equal(model.load("float32")["head"], params["head"])
    weights = export.Weights(model.config, model.tensors)
    with pytest.raises(ConfigError, match="no published form"):
        export.export(weights, tmp_path / "x", layout="huggingface", dtype="float32")
    mask = np.isin(np.arange(97), params["d2t"] + np.arange(40))
    save_file(tensors | {"t2d": mask}, tmp_path / "model.safetensors")
    open_model(tmp_path).check()
    save_file(tensors | {"t2d": ~mask}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="t2d marks 57 tokens, and not the 40 that d2t"):
        open_model(tmp_path)
    save_file(tensors | {"d2t": np.zeros(40, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t holds F32, expected integers"):
        open_model(tmp_path).check()


def test_speculators_configs_set_which_position_a_slot_predicts() -> None:
    """By either name; a head of another projector is refused before weights are read."""
    config, _ = make()
    assert isinstance(config, DSparkConfig)
    base = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer_config(config),
        "draft_vocab_size": 97,
        "aux_hidden_state_layer_ids": [1],
        "mask_token_id": 96,
        "projector_type": "dflash",
    }

    def read(**said: Any) -> bool:
        fields, _ = speculators.published_fields(base | said, where="config.json")
        return drafter_config(fields).sample_from_anchor

    assert [read(), read(shift_label=False), read(shift_label=True)] == [False, False, True]
    assert read(sample_from_anchor=True, shift_label=False)
    with pytest.raises(ConfigError, match="projector_type is 'medusa'"):
        read(projector_type="medusa", shift_label=True)
    assert not read(speculators_version="0.5", speculators_config={"algorithm": "dflash"})
    assert not read(norm_before_fc=None)
    with pytest.raises(ConfigError, match=r"does not apply to .*: norm_before_fc True"):
        read(norm_before_fc=True)
    with pytest.raises(ConfigError, match=r"layer_config asks for .*: attn_gate 'softplus'"):
        read(transformer_layer_config=layer_config(config) | {"attn_gate": "softplus"})


def test_speculators_configs_advise_the_drafts_of_a_step() -> None:
    """Their first proposal method does; both layouts keep it."""
    config, _ = make(speculative_tokens=3)
    fields = speculators.speculators_fields(config, "float32")
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    assert fields["speculators_config"]["proposal_methods"] == [method]
    read, _ = speculators.published_fields(fields, where="config.json")
    assert drafter_config(read).speculative_tokens == 3
    ours = drafter_fields(config, "float32")
    assert drafter_config(ours).speculative_tokens == 3
    for silent in None, {}, {"proposal_methods": []}, {"proposal_methods": [{}]}:
        read, _ = speculators.published_fields(
            fields | {"speculators_config": silent}, where="config.json"
        )
        assert drafter_config(read).speculative_tokens == 0
    for wrong in 0, -1, True, "3", 2.5:
        said = {"proposal_methods": [{"speculative_tokens": wrong}]}
        with pytest.raises(ConfigError, match=f"speculative_tokens is {wrong!r}; expected"):
            speculators.published_fields(fields | {"speculators_config": said}, where="x")


def test_an_unfilled_reduced_head_is_the_targets_rows(tmp_path: Path) -> None:
    config, params = make(draft_vocab_size=40, own_head=True)
    ids = np.sort(np.random.default_rng(0).choice(97, 40, replace=False))
    params["d2t"] = (ids - np.arange(40)).astype(np.int32)
    params["head"] = np.asarray(TABLE).T[:, ids]
    fields = speculators.speculators_fields(config, "float32")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    filled = stored(config, params)
    for head in ({"lm_head.weight": np.full((40, 32), np.nan, np.float32)}, {}):
        tensors = {k: v for k, v in filled.items() if k != "lm_head.weight"} | head
        save_file(tensors, tmp_path / "model.safetensors")
        model = open_model(tmp_path, role="drafter")
        assert isinstance(model.config, DrafterConfig)
        assert (model.config.own_head, model.config.draft_vocab_size) == (False, 40)
    found = propose(model.config, model.load("float32"))
    np.testing.assert_array_equal(found.tokens, propose(config, params).tokens)
    weights = export.Weights(model.config, model.tensors)
    with pytest.raises(ConfigError, match="no form in GGUF"):
        export.export(weights, tmp_path / "x.gguf", layout="gguf", dtype="float32")


def test_jetspec_is_version_one_with_causal_blocks() -> None:
    """`causal` is one of the drafter fields, and the architecture has another name."""
    config, _ = make()
    assert isinstance(config, DSparkConfig)
    fields = published_config(config)
    for name in [name for name in fields if "markov" in name or "confidence" in name]:
        del fields[name]
    del fields["num_anchors"]
    fields |= {"architectures": ["Qwen3DFlashDraftModel"], "dflash_config": {"causal": True}}
    found = drafter_config(fields)
    assert (found.kind, found.causal) == ("dflash", (True, True))
    assert drafter_config(fields | {"is_causal": False}).causal == (False, False)
    assert families.slots(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'; expected one of vanilla"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true but markov_rank is 0"),
        ({"markov_rank": -1}, "it must be at least 0"),
        ({"enable_confidence_head": 1}, "expected true or false"),
        ({"architectures": ["Qwen3DominoModel"]}, "expected one of DFlashDraftModel"),
        ({"gru_hidden_dim": 4}, "does not apply to .*: gru_hidden_dim 4"),
    ],
)
def test_a_config_it_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    config, _ = make()
    assert isinstance(config, DSparkConfig)
    with pytest.raises(ConfigError, match=message):
        drafter_config(published_config(config) | changes)
