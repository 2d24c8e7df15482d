"""The name tables and the modules must describe the same parameters."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from dflash_jax import families
from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.converters.formats.slots import Slot
from dflash_jax.families import drafter_kinds, family_of, target_families
from dflash_jax.families.gemma3 import Gemma3Config
from dflash_jax.families.lfm2 import Lfm2Config
from dflash_jax.families.smollm3 import SmolLM3Config
from dflash_jax.plan import Plan
from dflash_jax.testing import (
    planned,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)


def shapes(node, path=()) -> dict[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(node, dict):
        return {path: node.shape}
    return {k: v for key, child in node.items() for k, v in shapes(child, (*path, key)).items()}


def table(config: TargetConfig | DrafterConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {slot.path: slot.shape for slot in families.slots(config)}


EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_size": 16, "shared_expert_size": 20}
SANDWICH = {"norm_after": True, "qk_norm": True}
AFTER = {"joint_norm": True, "norm_before": False, "norm_after": True}
TARGETS: dict[str, Callable[..., TargetConfig]] = {
    "gemma3_text": lambda **changes: Gemma3Config(
        **vars(tiny_target(**SANDWICH | changes)), full_rope=RopeConfig()
    ),
    "gemma4_text": tiny_gemma,
    "gemma4_unified_text": tiny_gemma,
    "glm4": functools.partial(tiny_target, norm_after=True, rotated=4, qkv_bias=True),
    "gpt_oss": tiny_gpt_oss,
    "granite": tiny_target,
    "lfm2": lambda **changes: Lfm2Config(
        **vars(tiny_target(**{"qk_norm": True} | changes)),
        recurrent=(True, False, True),
        conv_kernel=3,
        conv_bias=True,
    ),
    "llama": tiny_target,
    "ministral3": functools.partial(
        tiny_target, query_growth=0.1, rope=RopeConfig(original_length=64)
    ),
    "mistral": tiny_target,
    "olmo2": functools.partial(tiny_target, **AFTER),
    "phi3": functools.partial(tiny_target, rotated=6),
    "qwen2": functools.partial(tiny_target, qkv_bias=True),
    "qwen3": functools.partial(tiny_target, qk_norm=True),
    "qwen3_5_text": tiny_hybrid,
    "qwen3_5_moe_text": functools.partial(tiny_hybrid, **EXPERTS),
    "qwen3_moe": tiny_moe,
    "qwen3_next": functools.partial(tiny_hybrid, **EXPERTS),
    "smollm3": lambda **changes: SmolLM3Config(**vars(tiny_target(**changes)), unrotated=(2,)),
}
BIASED = ("llama", "qwen3", "qwen3_moe")
CASES = [
    *((name, {"tie_embeddings": tied}) for name in TARGETS for tied in (False, True)),
    *((name, {"attention_bias": True}) for name in BIASED),
]


def test_every_target_family_is_among_the_cases():
    assert {family_of(name) for name in TARGETS} == set(target_families())


@pytest.mark.sample(
    "gemma4_text-changes2",
    "gpt_oss-changes8",
    "granite-changes11",
    "lfm2-changes12",
    "llama-changes14",
    "qwen3_5_moe_text-changes30",
    "smollm3-changes36",
    "qwen3_moe-changes40",
)
@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_a_name_table_fills_exactly_the_parameters_of_a_target(model_type, changes):
    target = TARGETS[model_type](model_type=model_type, **changes)
    params = planned(target, None, Plan(dtype="float32")).params
    assert shapes(params["target"]) == table(target)
    for slot in families.slots(target):
        assert_covers(slot)


@pytest.mark.parametrize("kind", drafter_kinds())
@pytest.mark.parametrize("bias", [False, True])
def test_a_name_table_fills_exactly_the_parameters_of_a_drafter(kind, bias):
    target = tiny_target()
    drafter = tiny_drafter(target, kind, attention_bias=bias)
    params = planned(target, drafter, Plan(dtype="float32")).params
    assert shapes(params["drafter"]) == table(drafter)
    for slot in families.slots(drafter):
        assert_covers(slot)


def assert_covers(slot: Slot) -> None:
    count = np.zeros(slot.shape, np.int32)
    for part in slot.parts:
        view = part.view(count)
        assert view.size == np.prod(part.shape)
        view += 1
    assert (count == 1).all(), slot.path
