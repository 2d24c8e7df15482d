"""Dense families of one shared decoder: speculative against plain tokens, greedy and sampled."""

from pathlib import Path

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.config import read_target_config
from dflash_jax.testing import random_engine, scripted_engine, set_script, tiny_drafter

FAMILIES = ("qwen2", "mistral", "smollm3", "gemma3", "olmo2", "granite", "glm4", "phi3")
NEW = 24


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_speculative_tokens_are_the_plain_ones(oracle: Path, name: str, dtype: str) -> None:
    target = read_target_config(oracle / "targets" / name)
    plan = dj.Plan(max_length=96, chunk=16, block=4, dtype=dtype)
    real = random_engine(target, tiny_drafter(target), plan)
    real.measures_drafting = False
    scripted = scripted_engine(real)
    scripted.measures_drafting = False
    for length, options in ((20, {}), (33, {"temperature": 0.8, "seed": 5})):
        prompt = np.random.default_rng(length).integers(0, target.vocab_size, length).tolist()
        plain = real.generate(prompt, max_tokens=NEW, speculative=False, **options).token_ids
        assert real.generate(prompt, max_tokens=NEW, **options).token_ids == plain
        truth = np.array([*prompt, *plain])
        wrong = np.random.default_rng(0).random(len(truth)) < 0.3
        set_script(scripted, ((truth + wrong) % target.vocab_size).tolist())
        result = scripted.generate(prompt, max_tokens=NEW, **options)
        assert result.token_ids == plain
        assert result.stats.acceptance_length > 1.3
