"""Configs of public models, as published: totals, and what `explain` says, with no weights."""

import tracemalloc
from typing import Any

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.compiler import resolve
from dflash_jax.compiler.explain import explain
from dflash_jax.compiler.memory import drafter_weights, parameters, target_weights, work
from dflash_jax.compiler.roofline import DEVICES
from dflash_jax.config import DrafterConfig, TargetConfig, check_pair, drafter_config, target_config

H200 = DEVICES["H200"]
QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
}
QWEN3_8B = QWEN3 | {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
}
CODER_30B = QWEN3 | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
OSS_20B_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": True,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 7680,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_target_layers": 24,
    "rms_norm_eps": 1e-5,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "vocab_size": 201088,
}
TARGETS = {"qwen3-8b": QWEN3_8B, "qwen3-coder-30b-a3b": CODER_30B, "gpt-oss-20b": OSS_20B}


def drafter_for(name: str) -> DrafterConfig | None:
    return drafter_config(OSS_20B_DFLASH) if name == "gpt-oss-20b" else None


def config(name: str) -> TargetConfig:
    return target_config(TARGETS[name])


def test_totals_are_the_published_ones() -> None:
    totals = {name: target_weights(config(name)) for name in TARGETS}
    assert totals == {
        "qwen3-8b": 8_190_735_360,
        "qwen3-coder-30b-a3b": 30_532_122_624,
        "gpt-oss-20b": 20_914_757_184,
    }
    target, drafter = config("gpt-oss-20b"), drafter_config(OSS_20B_DFLASH)
    check_pair(target, drafter)
    assert drafter.attention_bias
    assert drafter_weights(target, drafter) == 784_767_104
    biases = sum(n for p, n in parameters(target, drafter)["drafter"].items() if "bias" in p)
    assert biases == 8 * (64 * 64 + 2 * 8 * 64 + 2880)


@pytest.mark.parametrize("name", TARGETS)
def test_explain_says_what_a_model_needs_without_allocating(name: str) -> None:
    target, drafter = config(name), drafter_for(name)
    before = len(jax.live_arrays())
    tracemalloc.start()
    plan = resolve(Plan(), target, drafter, platform="gpu", memory=H200.memory)
    found = explain(target, drafter, plan, H200, compile=False)
    lines = str(found).splitlines()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert len(jax.live_arrays()) == before
    assert found.budget.weights == 2 * sum(
        sum(role.values()) for role in parameters(target, drafter).values()
    )
    assert found.budget.total < H200.memory
    rooflines = {p.name: p.roofline for p in found.programs if p.roofline}
    assert {"prefill", "plain"} <= rooflines.keys()
    assert all(0 < r.seconds < 0.1 for r in rooflines.values())
    assert rooflines["plain"].bound == "memory"
    assert any(line.startswith("plain ") for line in lines)


def test_work_counts_only_the_experts_that_are_used() -> None:
    """Qwen3-Coder-30B-A3B: 3.3 billion weights act on a token; the embedding is only looked up."""
    target = config("qwen3-coder-30b-a3b")
    plan = resolve(Plan(block=8), target, None, platform="gpu", memory=H200.memory)
    one, block, chunk = (work(plan, target, None, p) for p in ("plain1", "plain", "prefill"))
    expert = 3 * 2048 * 768 * 48  # of one number, in all layers
    rest = 30_532_122_624 - 151936 * 2048 - 128 * expert
    caches = one.bytes - 2 * (rest + 8 * expert)
    assert caches == 2 * 2 * 48 * 4 * 128 * plan.slots
    assert block.bytes == 2 * (rest + 64 * expert) + caches  # 8 tokens, 8 experts each
    assert chunk.bytes == 2 * (rest + 128 * expert) + caches  # no more than there are
    scores = 4 * 32 * 128 * 48 * plan.slots
    assert one.flops == 2 * (rest + 8 * expert) + scores
    assert block.flops == 8 * one.flops
