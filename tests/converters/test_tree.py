"""The name tables and the modules must describe the same parameters."""

import jax
import numpy as np
import pytest

from converters import names
from dflash_jax.compiler.programs import init_params
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.testing import tiny_drafter, tiny_gpt_oss, tiny_moe, tiny_target

MAKE = {"gpt_oss": tiny_gpt_oss, "qwen3_moe": tiny_moe}  # the others are all tiny_target


def shapes(node, path=()) -> dict[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(node, dict):
        return {path: node.shape}
    return {k: v for key, child in node.items() for k, v in shapes(child, (*path, key)).items()}


def table(config: TargetConfig | DrafterConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {slot.path: slot.shape for slot in names.slots(config)}


@pytest.mark.parametrize("model_type", names.TARGETS)
@pytest.mark.parametrize(("bias", "tied"), [(False, True), (True, False)])
def test_a_name_table_fills_exactly_the_parameters_of_its_module(model_type, bias, tied):
    normed = model_type in ("qwen3", "qwen3_moe")
    changes = {"model_type": model_type, "attention_bias": bias, "qk_norm": normed}
    target = MAKE.get(model_type, tiny_target)(tie_embeddings=tied, **changes)
    drafter = tiny_drafter(target, attention_bias=bias)
    params = jax.eval_shape(lambda: init_params(target, drafter, seed=0))
    assert shapes(params["target"]) == table(target)
    assert shapes(params["drafter"]) == table(drafter)


@pytest.mark.parametrize("model_type", names.TARGETS)
def test_the_parts_of_a_parameter_cover_it_once(model_type):
    make = MAKE.get(model_type, tiny_target)
    target = make(model_type=model_type, attention_bias=True, qk_norm=True)
    for config in (target, tiny_drafter(target, attention_bias=True)):
        for slot in names.slots(config):
            assert_covers(slot)


def assert_covers(slot: names.Slot) -> None:
    count = np.zeros(slot.shape, np.int32)
    for part in slot.parts:
        view = part.view(count)
        assert view.size == np.prod(part.shape)
        view += 1
    assert (count == 1).all(), slot.path
