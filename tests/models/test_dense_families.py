"""Dense families of one shared decoder: speculative against plain tokens, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import open_model
from dflash_jax.errors import ConfigError
from dflash_jax.families.configs import read_target_config, target_config
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_engine, scripted_engine, set_script, tiny_drafter

FAMILIES = ("qwen2", "mistral", "smollm3", "gemma3", "olmo2", "granite", "glm4", "phi3")
FAMILIES += ("ministral3", "lfm2")
NEW = 24
SOAK = pytest.mark.soak


REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (20, {}),
    "sampled": (33, {"temperature": 0.8, "seed": 5}),
}
# Each family in one way; `make soak` has all.
CHOSEN = {(name, "bfloat16", "greedy") for name in FAMILIES}
CHOSEN ^= {(name, "bfloat16", how) for name in ("granite", "lfm2") for how in REQUESTS}
COMBINED = [
    pytest.param(*case, marks=() if case in CHOSEN else SOAK)
    for case in itertools.product(FAMILIES, ["bfloat16", "float32"], REQUESTS)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtype", "request_kind"), COMBINED)
def test_speculative_tokens_are_the_plain_ones(
    oracle: Path, name: str, dtype: str, request_kind: str
) -> None:
    target = read_target_config(oracle / "targets" / name)
    plan = dj.Plan(max_length=96, chunk=16, block=4, dtype=dtype)
    real = random_engine(target, tiny_drafter(target), plan)
    real.measures_drafting = False
    scripted = scripted_engine(real)
    scripted.measures_drafting = False
    length, options = REQUESTS[request_kind]
    prompt = np.random.default_rng(length).integers(0, target.vocab_size, length).tolist()
    plain = real.generate(prompt, max_tokens=NEW, speculative=False, **options).token_ids
    assert real.generate(prompt, max_tokens=NEW, **options).token_ids == plain
    truth = np.array([*prompt, *plain])
    wrong = np.random.default_rng(0).random(len(truth)) < 0.3
    set_script(scripted, ((truth + wrong) % target.vocab_size).tolist())
    result = scripted.generate(prompt, max_tokens=NEW, **options)
    assert result.token_ids == plain
    assert result.stats.acceptance_length > 1.3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; expected 4 entries"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "expected 1 or more"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; expected 1"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "expected more than 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "only None is supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "only None, False is supported"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is not positive"),
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected 0 to 1"),
        ("glm4", {"partial_rotary_factor": 0.2}, "3 of 16 dimensions are to be rotated"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias is True; only False"),
        ("ministral3", {"attention_bias": True}, "attention_bias is True; only False"),
        ("ministral3", {"text_config": {"model_type": "mistral4"}}, "'mistral4'; only 'mistral'"),
        ("ministral3", {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ("lfm2", {"layer_types": ["conv", "linear_attention"]}, "expected 4 entries of"),
        ("lfm2", {"full_attn_idxs": 2}, "full_attn_idxs is 2; expected a list of layers"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0; expected 1 or more"),
        ("lfm2", {"conv_L_cache": 1}, "conv_kernel is 1; it must be at least 2"),
        ("lfm2", {"attention_bias": True}, "attention_bias is True; only False"),
    ],
)
def test_fields_that_no_module_can_follow_are_refused(
    oracle: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    given = json.loads((oracle / "targets" / name / "config.hub.json").read_text())
    with pytest.raises(ConfigError, match=message):
        target_config(given | changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3_scale", "scores times 0.204"),
        ("mistral_windows", "a sliding window of this mistral target"),
        ("qwen2_windows", "a sliding window of this qwen2 target"),
        ("smollm3_windows", "a sliding window, rotation in other layers"),
    ],
)
def test_gguf_files_refuse_what_their_architecture_cannot_hold(
    oracle: Path, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(open_model(oracle / "variants" / name), tmp_path / "x.gguf", to="gguf")
    assert not [*tmp_path.iterdir()]


def test_a_mistral_is_written_as_a_llama(oracle: Path, tmp_path: Path) -> None:
    folder, path = oracle / "targets" / "mistral", tmp_path / "x.gguf"
    convert(open_model(folder), path, to="gguf", dtype="f32")
    found = open_model(path)
    assert found.config.model_type == "llama"
    ids = np.arange(3, 43)[None]
    expected = dj.load_target(folder).forward(ids).logits
    model = TargetModel(found.config, found.load("float32"), "float32")
    np.testing.assert_array_equal(model.forward(ids).logits, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(x, marks=SOAK) for x in ("ministral3", "qwen3_next"))]
)
def test_drafts_copied_from_the_text_change_no_token(oracle: Path, name: str) -> None:
    plan = dj.Plan(max_length=160, chunk=16, block=8)
    engine = dj.load(oracle / "targets" / name, "ngram", plan=plan)
    engine.measures_drafting = False
    prompt = np.random.default_rng(0).integers(3, 120, 12).tolist() * 5
    for options in ({}, {"temperature": 0.7, "seed": 3}):
        options |= {"max_tokens": 64, "ignore_eos": True}
        plain = engine.generate(prompt, speculative=False, **options).token_ids
        assert engine.generate(prompt, **options).token_ids == plain


def test_a_text_model_in_a_multimodal_config_is_the_same_target(oracle: Path) -> None:
    """As in Ministral 3, and as in Mistral Small 3, whose queries do not grow."""
    found = json.loads((oracle / "targets" / "ministral3" / "config.hub.json").read_text())
    outer = {"model_type": "mistral3", "vision_config": {}, "text_config": found}
    outer |= {"torch_dtype": "float32", "eos_token_id": 2, "spatial_merge_size": 2}
    assert target_config(outer) == target_config(found)
    for key in ("model_type", "rope_parameters"):
        del found[key]
    older = target_config(
        outer | {"text_config": found | {"rope_theta": 1e9, "sliding_window": None}}
    )
    assert (older.model_type, older.query_growth, older.rope.kind) == ("ministral3", 0, "default")
    assert (older.rope.theta, older.windows) == (1e9, (None,) * 3)


def test_vision_weights_of_a_ministral_are_set_aside(oracle: Path, tmp_path: Path) -> None:
    folder = oracle / "targets" / "ministral3"
    found = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "mistral3", "text_config": found, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.patch_conv.weight"] = np.zeros((2, 2), np.float32)
    tensors["multi_modal_projector.linear_1.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    vectors = load_file(folder / "vectors.safetensors")
    logits = dj.load_target(tmp_path).forward(vectors["input_ids"]).logits
    np.testing.assert_allclose(logits, vectors["logits"], atol=2e-4, rtol=0)
