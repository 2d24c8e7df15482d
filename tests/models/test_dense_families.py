"""Dense families of one shared decoder: speculative against plain tokens, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.config import read_target_config, target_config
from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import open_model
from dflash_jax.errors import ConfigError
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_engine, scripted_engine, set_script, tiny_drafter

FAMILIES = ("qwen2", "mistral", "smollm3", "gemma3", "olmo2", "granite", "glm4", "phi3")
NEW = 24


REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (20, {}),
    "sampled": (33, {"temperature": 0.8, "seed": 5}),
}
# Each family in one way; `make soak` has all.
COMBINED = [
    pytest.param(*case, marks=() if case[1:] == ("bfloat16", how) else pytest.mark.soak)
    for name, how in zip(FAMILIES, ["greedy", "sampled"] * len(FAMILIES), strict=False)
    for case in itertools.product([name], ["bfloat16", "float32"], REQUESTS)
]


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
