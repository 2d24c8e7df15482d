"""Rare features of targets, against vectors of transformers 5.15: biases, windows, ropes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj

VARIANTS = (
    "gemma4_biases_ropes",  # linear and yarn, and per-layer inputs of more rows than tokens
    "gemma3_scale",  # of scores; a softcap and biases
    "gpt_oss_no_bias",  # the plain rotary embedding, full layers first
    "granite_biases",  # in MLPs too
    "llama_biases_dynamic",  # in MLPs too; longer than the config's positions
    "ministral_windows",  # in some layers
    "mistral_windows",  # in all layers
    "olmo2_biases",
    "qwen2_windows",
    "qwen3_5_biases",  # yarn with two scales, of a part of each head
    "qwen3_moe_windows_longrope",
    "smollm3_windows",  # and biases; other layers without rotation
)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_a_whole_pass(oracle: Path, name: str) -> None:
    vectors = load_file(oracle / "variants" / name / "vectors.safetensors")
    logits = dj.load_target(oracle / "variants" / name).forward(vectors["input_ids"]).logits
    np.testing.assert_allclose(logits, vectors["logits"], atol=2e-4, rtol=0)
