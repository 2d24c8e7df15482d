"""With native kernels a token has the same bits in calls of any width and any number of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.audit.models import FAMILIES
from dflash_jax import Plan
from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.errors import PlanError
from dflash_jax.families import family_of, target_families
from dflash_jax.families.smollm3 import SmolLM3Config
from dflash_jax.graph.build import jit
from dflash_jax.graph.state import DecodeState, commit
from dflash_jax.graph.steps.pair import StepOptions, forward, logits_of
from dflash_jax.kernels.native.build import library
from dflash_jax.networks import build_pair, build_target
from dflash_jax.testing import (
    planned,
    random_engine,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)

pytestmark = pytest.mark.skipif(
    not library(), reason=f"there are no native kernels: {library().reason}"
)
BLOCK, BLOCKS, VOCAB = 6, 7, 97
LLAMA = tiny_target(
    model_type="llama", qk_norm=False, num_layers=2, windows=(None, None), mlp_bias=True
)
QWEN3 = tiny_target(num_layers=2, windows=(None, 20), attention_bias=True)
# Sizes of which vectors of 8 or 16 leave a rest, and of which XLA may split a loop or a sum.
ODD = dataclasses.replace(LLAMA, hidden_size=72, intermediate_size=200, num_layers=1, windows=())
WIDE = dataclasses.replace(QWEN3, hidden_size=576, intermediate_size=1536, head_dim=64)
QWEN2 = dataclasses.replace(QWEN3, model_type="qwen2", qk_norm=False, qkv_bias=True)
MISTRAL = dataclasses.replace(LLAMA, model_type="mistral", windows=(20, 20), mlp_bias=False)
SMOLLM3 = SmolLM3Config(**vars(LLAMA) | {"model_type": "smollm3"}, unrotated=(1,))
MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    model_type="ministral3",
    windows=(None, None),
    query_growth=0.3,
    rope=RopeConfig(kind="yarn", factor=4.0, original_length=8),
)
OF_AUDIT = ("gemma3", "gemma4", "olmo2", "granite", "glm4", "phi3", "lfm2")
SHARED = tiny_gemma(num_experts=0)  # with shared keys and inputs of each layer
# Products of so many numbers are no small ones, which XLA computes alike at any width.
PER_LAYER = dataclasses.replace(SHARED, hidden_size=576, per_layer_size=256)
EXPERTS: dict[str, Any] = {"hidden_size": 576, "num_experts": 60, "experts_per_token": 4}
CASES = {"llama": LLAMA, "qwen3": QWEN3, "odd": ODD, "wide": WIDE}
CASES |= {"qwen2": QWEN2, "mistral": MISTRAL, "smollm3": SMOLLM3, "ministral3": MINISTRAL3}
CASES |= {name: FAMILIES[name] for name in OF_AUDIT} | {"gemma4, shared": SHARED}
CASES |= {"gemma4, per layer": PER_LAYER, "qwen3_moe": tiny_moe(**EXPERTS)}
CASES |= {"gpt_oss": tiny_gpt_oss(**EXPERTS), "gemma4, experts": tiny_gemma(**EXPERTS)}
INT8: dict[str, Any] = {"weights": "int8"}
FLOAT: dict[str, Any] = {"kernels": "native"}


def all_steps(
    target: TargetConfig, plan: Plan, params: Any, tokens: np.ndarray, width: int, start: int
) -> tuple[np.ndarray, Any]:
    """Logits [B, N, V] of tokens fed `width` at a time, and the keys and values of the last.

    Slots before `start` hold zeros, which are keys like others.
    """
    options = StepOptions(block=width, kernels=plan.kernels)
    pair = build_pair(target, None).with_options(options)

    def step(params: Any, state: DecodeState, tokens: jax.Array) -> Any:
        caches, draft, hidden = forward(pair, params, state, tokens, chunked=False)
        fed = jnp.full((plan.rows,), width)
        logits = logits_of(pair, params, hidden)
        return commit(state, caches, draft, fed, state.anchor), logits

    state = dataclasses.replace(
        planned(target, None, plan).empty_state(),
        position=jnp.full((plan.rows,), start, jnp.int32),
    )
    run, found = jit(step), []
    for at in range(0, tokens.shape[1], width):
        state, logits = run(params, state, tokens[:, at : at + width])
        found.append(np.asarray(logits))
    return np.concatenate(found, axis=1), jax.tree.leaves(state.target)


@pytest.mark.sample("llama-1-changes0", "odd-3-changes15", "gemma3-1-changes7", "per layer-1-")
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("name", "rows", "changes"),
    [
        ("llama", 1, INT8),
        ("qwen3", 1, FLOAT),
        ("wide", 1, INT8),
        ("qwen2", 1, FLOAT),
        ("mistral", 1, INT8),
        ("smollm3", 1, FLOAT),
        ("ministral3", 1, FLOAT),
        ("gemma3", 1, INT8),
        ("gemma4", 1, FLOAT),
        ("gemma4, shared", 2, INT8),
        ("olmo2", 1, FLOAT | {"dtype": "bfloat16"}),
        ("granite", 1, INT8),
        ("glm4", 1, FLOAT),
        ("phi3", 1, INT8),
        ("lfm2", 2, FLOAT),
        ("odd", 3, FLOAT | {"dtype": "bfloat16"}),
        ("qwen3", 2, INT8 | {"kv_dtype": "int8"}),
        ("qwen3", 2, INT8 | {"kv_dtype": "float16"}),
        ("llama", 1, FLOAT | {"start": 1000}),  # of larger angles
        pytest.param("wide", 1, FLOAT, marks=pytest.mark.soak),
        pytest.param("wide", 4, INT8, marks=pytest.mark.soak),
        pytest.param("wide", 1, {"weights": "int4"}, marks=pytest.mark.soak),
        pytest.param("wide", 1, FLOAT | {"dtype": "float16"}, marks=pytest.mark.soak),
        pytest.param("odd", 1, INT8, marks=pytest.mark.soak),
        pytest.param("odd", 1, INT8 | {"activations": "float"}),
        pytest.param("wide", 1, FLOAT | {"start": 30_000}, marks=pytest.mark.soak),
        pytest.param("llama", 1, FLOAT | {"dtype": "bfloat16"}, marks=pytest.mark.soak),
        pytest.param("qwen3", 1, INT8 | {"dtype": "bfloat16"}, marks=pytest.mark.soak),
        pytest.param("gemma4, per layer", 1, FLOAT, id="per layer-1-"),
        ("gemma4, experts", 2, INT8),
        ("qwen3_moe", 1, FLOAT | {"dtype": "bfloat16"}),
        ("gpt_oss", 1, INT8),
    ],
)
def test_a_token_has_the_same_bits_at_any_width(name: str, rows: int, changes: Any) -> None:
    target = dataclasses.replace(CASES[name], max_length=40_000)
    changes = dict(changes)
    start = changes.pop("start", 0)
    plan = Plan(rows=rows, block=BLOCK, chunk=16, max_length=start + 128, **changes)
    engine = random_engine(target, None, plan=plan)
    assert engine.plan.kernels == "native"
    assert engine.plan.plain_width == 1
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, BLOCK * BLOCKS)).astype(np.int32)
    ends = start + tokens.shape[1]
    found = {
        width: all_steps(target, engine.plan, engine.params, tokens, width, start)
        for width in (1, 2, BLOCK, 14)
    }
    logits, caches = found[BLOCK]
    for width, (others, kept) in found.items():
        np.testing.assert_array_equal(others, logits, err_msg=f"width {width}")
        for one, other in zip(caches, kept, strict=True):
            if one.ndim > 2 and one.shape[2] >= ends:  # a ring keeps its last slots only
                np.testing.assert_array_equal(one[:, :, :ends], other[:, :, :ends])


def test_families_whose_other_operations_round_keep_block_wide_steps() -> None:
    engine = random_engine(tiny_hybrid(), None, Plan(block=4, max_length=64, kernels="native"))
    assert engine.plan.plain_width == 4
    plan = Plan(block=4, max_length=64, plain_width=1, kernels="native")
    with pytest.raises(PlanError, match=r"plain_width is 1 for .* use 4 \(or 0\), or exact=False"):
        random_engine(tiny_hybrid(), None, plan=plan)


@pytest.mark.parametrize("width", [2, 7])
def test_a_width_between_one_and_the_block_is_refused(width: int) -> None:
    drafter = tiny_drafter(LLAMA)
    with pytest.raises(PlanError, match=f"plain_width is {width}; expected 1 or the block, 4"):
        random_engine(LLAMA, drafter, plan=Plan(block=4, max_length=64, plain_width=width))


def test_every_family_of_any_width_is_tested_here() -> None:
    tested = {family_of(target.model_type) for target in CASES.values()}
    assert tested == target_families().keys() - {"qwen3_5", "qwen3_next"}
    assert all(build_target(target).width_invariant for target in CASES.values())
    assert not build_target(tiny_hybrid()).width_invariant


@pytest.mark.parametrize("name", CASES)
def test_families_of_any_width_leave_no_product_to_xla(name: str) -> None:
    """XLA multiplies a matrix of real sizes otherwise for one token than for several."""
    pair = planned(CASES[name], None, Plan(max_length=64, kernels="native"))
    forms = {path.removeprefix("target/"): form for path, form in pair.forms.items()}
    leaves = jax.tree_util.tree_leaves_with_path(pair.params["target"])
    paths = [jax.tree_util.keystr(at, simple=True, separator="/") for at, _ in leaves]
    plain = {path.split("/arrays/")[0]: x.ndim for path, (_, x) in zip(paths, leaves, strict=True)}
    others = [path for path, axes in plain.items() if axes > 1 and forms.get(path, "") == ""]
    added = ("_bias", "sinks", "conv")  # added, or multiplied number by number
    assert [path for path in others if not path.endswith(added)] == []
