"""Oracle targets of every family written to GGUF by the gguf package, as llama.cpp does it.

Independent of our tables: names, orders and transforms are spelt out here from the fact sheet.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy
from gguf_models import LAYER, Q, finish, interleave

Tensors = dict[str, np.ndarray]
WHOLE = (
    "ffn_gate_inp",
    "ssm_conv1d",
    "shortconv.conv",
    "per_layer_model_proj",
    "norm",
)  # never quantised
ATTENTION = [(theirs, ours) for theirs, ours in LAYER if ours.startswith("attn_")]
MLP = [(theirs, ours) for theirs, ours in LAYER if ours in ("ffn_gate", "ffn_up", "ffn_down")]


def write_family(
    folder: Path,
    path: Path,
    kind: Q = Q.F32,
    *,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    form: Callable[[Tensors], Tensors] = lambda found: found,
) -> Path:
    """A Hugging Face target of any family; `extra` may add keys, `form` respell tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): array for name, array in tensors.items()}
    architecture, keys, rename = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    common(writer, config)
    keys(writer, config, architecture)
    outer = {"token_embd.weight": tensors["embed_tokens.weight"]}
    if "norm.weight" in tensors:
        outer["output_norm.weight"] = tensors["norm.weight"]
    if "lm_head.weight" in tensors:
        outer["output.weight"] = tensors["lm_head.weight"]
    found = outer | rename(tensors, config)
    if architecture.startswith("qwen35") or architecture in ("gemma3", "qwen3next"):
        found["output_norm.weight"] = found["output_norm.weight"] + 1
    for name, array in form(found).items():
        add(writer, name, array, kind)
    extra(writer)
    finish(writer)
    return path


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: Q) -> None:
    """Add a tensor quantised as by llama.cpp: vectors and small tables stay F32, odd rows F16."""
    kept = array.ndim == 1 or not name.endswith(".weight") or any(part in name for part in WHOLE)
    if kept or kind == Q.F32:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        return
    kind = Q.F16 if array.shape[-1] % 32 else kind
    packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
    writer.add_tensor(name, packed, raw_dtype=kind)


def common(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])


def heads(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def layers(config: dict) -> range:
    return range(config["num_hidden_layers"])


def renamed(tensors: Tensors, i: int, pairs: list[tuple[str, str]]) -> Tensors:
    """Return weights and biases that exist, by GGUF name."""
    return {
        f"blk.{i}.{ours}.{suffix}": tensors[f"layers.{i}.{theirs}.{suffix}"]
        for theirs, ours in pairs
        for suffix in ("weight", "bias")
        if f"layers.{i}.{theirs}.{suffix}" in tensors
    }


def stacked(tensors: Tensors, i: int, experts: int) -> Tensors:
    """Return the experts of a layer, one stack per matrix."""
    return {
        f"blk.{i}.ffn_{x}_exps.weight": np.stack(
            [tensors[f"layers.{i}.mlp.experts.{e}.{x}_proj.weight"] for e in range(experts)]
        )
        for x in ("gate", "up", "down")
    }


def qwen3_moe_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    heads(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def qwen3_moe(tensors: Tensors, config: dict) -> Tensors:
    found: Tensors = {}
    for i in layers(config):
        found |= renamed(tensors, i, LAYER)
        if i not in config["mlp_only_layers"]:
            found |= stacked(tensors, i, config["num_local_experts"])
            found |= renamed(tensors, i, [("mlp.gate", "ffn_gate_inp")])
    return found


def qwen3_5_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    heads(writer, config)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    writer.add_ssm_inner_size(inner)
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{architecture}.attention.recurrent_layers", kinds)
    if "num_experts" not in config:
        writer.add_feed_forward_length(config["intermediate_size"])
        return
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def tile(array: np.ndarray, config: dict, axis: int, width: int) -> np.ndarray:
    """Reorder value heads from grouped by key head to tiled over the key heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    moved = np.moveaxis(array, axis, 0)
    split = moved.reshape(keys, values // keys, width, *moved.shape[1:])
    return np.moveaxis(split.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def qwen3_5(tensors: Tensors, config: dict) -> Tensors:
    found: Tensors = {}
    width = config["linear_value_head_dim"]
    kept = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    for i in layers(config):
        pairs = [p for p in LAYER if p[1] != "ffn_norm"]
        layer = renamed(tensors, i, [*pairs, ("post_attention_layernorm", "post_attention_norm")])
        for name in layer:
            if name.endswith("norm.weight"):
                layer[name] = layer[name] + 1
        if "num_experts" in config:
            layer |= stacked(tensors, i, config["num_experts"])
            shared = [(f"mlp.shared_expert.{x}_proj", f"ffn_{x}_shexp") for x in MLP_PARTS]
            layer |= renamed(tensors, i, [("mlp.gate", "ffn_gate_inp"), *shared])
            gate = tensors[f"layers.{i}.mlp.shared_expert_gate.weight"]
            layer[f"blk.{i}.ffn_gate_inp_shexp.weight"] = gate.reshape(-1)
        found |= layer
        if config["layer_types"][i] != "linear_attention":
            continue
        own = f"layers.{i}.linear_attn."
        qkv, conv = tensors[f"{own}in_proj_qkv.weight"], tensors[f"{own}conv1d.weight"][:, 0]
        found |= {
            f"blk.{i}.attn_qkv.weight": np.concatenate(
                [qkv[:kept], tile(qkv[kept:], config, 0, width)]
            ),
            f"blk.{i}.ssm_conv1d.weight": np.concatenate(
                [conv[:kept], tile(conv[kept:], config, 0, width)]
            ),
            f"blk.{i}.attn_gate.weight": tile(tensors[f"{own}in_proj_z.weight"], config, 0, width),
            f"blk.{i}.ssm_beta.weight": tile(tensors[f"{own}in_proj_b.weight"], config, 0, 1),
            f"blk.{i}.ssm_alpha.weight": tile(tensors[f"{own}in_proj_a.weight"], config, 0, 1),
            f"blk.{i}.ssm_a": tile(-np.exp(tensors[f"{own}A_log"]), config, 0, 1),
            f"blk.{i}.ssm_dt.bias": tile(tensors[f"{own}dt_bias"], config, 0, 1),
            f"blk.{i}.ssm_norm.weight": tensors[f"{own}norm.weight"],
            f"blk.{i}.ssm_out.weight": tile(tensors[f"{own}out_proj.weight"], config, 1, width),
        }
    return found


MLP_PARTS = ("gate", "up", "down")


def gemma4_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    full = next(iter(config["per_layer_config"].values()))
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    own, other = config["num_key_value_heads"], full.get("num_key_value_heads")
    writer.add_head_count_kv([own if s or other is None else other for s in sliding])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_uint32(f"{architecture}.attention.key_length_swa", config["head_dim"])
    writer.add_uint32(f"{architecture}.attention.value_length_swa", config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    base = rope["sliding_attention"]["rope_theta"]
    writer.add_float32(f"{architecture}.rope.freq_base_swa", base)
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    writer.add_uint32(f"{architecture}.attention.shared_kv_layers", shared)
    size = config.get("hidden_size_per_layer_input", 0)
    writer.add_uint32(f"{architecture}.embedding_length_per_layer_input", size)
    count = config["num_hidden_layers"]
    factor = 1 + config["use_double_wide_mlp"]
    widths = [inner * (factor if i >= count - shared else 1) for i in range(count)]
    writer.add_feed_forward_length(widths if len({*widths}) > 1 else inner)
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


GEMMA4 = [
    *(p for p in LAYER if p[1] != "ffn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("router.proj", "ffn_gate_inp"),
]
GEMMA4_BARE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
GEMMA4_OUTER = {
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def gemma4(tensors: Tensors, config: dict) -> Tensors:
    found = {ours: tensors[theirs] for theirs, ours in GEMMA4_OUTER.items() if theirs in tensors}
    full = next(iter(config["per_layer_config"].values()))["head_dim"]
    turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * full // 2)
    divisors = [1.0] * turning + [1e30] * (full // 2 - turning)
    found["rope_freqs.weight"] = np.array(divisors, np.float32)
    for i in layers(config):
        found |= renamed(tensors, i, GEMMA4)
        bare = {ours: tensors.get(f"layers.{i}.{theirs}") for theirs, ours in GEMMA4_BARE.items()}
        found |= {f"blk.{i}.{ours}": array for ours, array in bare.items() if array is not None}
    return found


def gpt_oss_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    heads(writer, config)
    rope = config["rope_parameters"]
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def gpt_oss(tensors: Tensors, config: dict) -> Tensors:
    found: Tensors = {}
    for i in layers(config):
        norms = [("post_attention_layernorm", "post_attention_norm"), LAYER[0]]
        found |= renamed(tensors, i, [*ATTENTION, *norms, ("mlp.router", "ffn_gate_inp")])
        found[f"blk.{i}.attn_sinks.weight"] = tensors[f"layers.{i}.self_attn.sinks"]
        own = f"layers.{i}.mlp.experts."
        both, bias = tensors[f"{own}gate_up_proj"], tensors[f"{own}gate_up_proj_bias"]
        for j, x in enumerate(("gate", "up")):
            found[f"blk.{i}.ffn_{x}_exps.weight"] = both[:, :, j::2].swapaxes(1, 2)
            found[f"blk.{i}.ffn_{x}_exps.bias"] = bias[:, j::2]
        found[f"blk.{i}.ffn_down_exps.weight"] = tensors[f"{own}down_proj"].swapaxes(1, 2)
        found[f"blk.{i}.ffn_down_exps.bias"] = tensors[f"{own}down_proj_bias"]
    return found


def dense_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    heads(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])


def dense(tensors: Tensors, config: dict) -> Tensors:
    return {k: v for i in layers(config) for k, v in renamed(tensors, i, LAYER).items()}


def named(tensors: Tensors, config: dict) -> Tensors:
    """Return tensors by the names of the gguf package; norms of Gemma 3 with 1 added."""
    architecture = FAMILIES[config["model_type"]][0]
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found: Tensors = {}
    for name, array in tensors.items():
        if not name.startswith("layers."):
            continue
        ours = table.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
        assert ours is not None
        one = architecture == "gemma3" and name.endswith("norm.weight")
        found[ours] = array + np.float32(1) if one else array
    return found


def turned(tensors: Tensors, config: dict) -> Tensors:
    """Return tensors with the rotary rows of queries and keys in pairs, as Llama's."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return {
        name: interleave(array, heads[name[name.index(".attn_") + 6]])
        if ".attn_q." in name or ".attn_k." in name
        else array
        for name, array in named(tensors, config).items()
    }


def gemma3_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    both = config["rope_parameters"]
    full, sliding = both["full_attention"], both["sliding_attention"]
    dense_keys(writer, config | {"rope_parameters": full}, architecture)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(full["factor"])
    writer.add_float32(f"{architecture}.rope.freq_base_swa", sliding["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(kinds)


def granite_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    dense_keys(writer, config, architecture)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def glm4_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    dense_keys(writer, config, architecture)
    share = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * share))


def phi3_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    dense_keys(writer, config, architecture)
    rope, width = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
    original = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    times = config["max_position_embeddings"] / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(times) / math.log(original)))


def phi3(tensors: Tensors, config: dict) -> Tensors:
    factors = {
        f"rope_factors_{x}.weight": np.array(config["rope_parameters"][f"{x}_factor"], np.float32)
        for x in ("long", "short")
    }
    return named(tensors, config) | factors


def ministral3_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    dense_keys(writer, config, architecture)
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def qwen3_next_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    qwen3_5_keys(writer, config | {"rope_parameters": {"mrope_section": [], **ROPE}}, architecture)
    keys = writer.kv_data[0]
    for key in ("rope.dimension_sections", "attention.recurrent_layers"):
        del keys[f"{architecture}.{key}"]
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


ROPE = {"rope_theta": 10000.0}


def qwen3_next(tensors: Tensors, config: dict) -> Tensors:
    """Value heads stay grouped; queries, keys, values and gates are unpicked head by head."""
    plain = {k: v for k, v in tensors.items() if ".linear_attn." not in k}
    kinds = ["full_attention"] * config["num_hidden_layers"]
    found = qwen3_5(plain, config | {"layer_types": kinds})
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    for i, kind in enumerate(config["layer_types"]):
        if kind != "linear_attention":
            continue
        own = f"layers.{i}.linear_attn."
        by_head = np.split(tensors[f"{own}in_proj_qkvz.weight"], heads)
        cuts = [width, 2 * width, 2 * width + each]
        parts = [np.split(head, cuts) for head in by_head]
        *qkv, z = (np.concatenate(part) for part in zip(*parts, strict=True))
        found |= {
            f"blk.{i}.attn_qkv.weight": np.concatenate(qkv),
            f"blk.{i}.attn_gate.weight": z,
            f"blk.{i}.ssm_ba.weight": tensors[f"{own}in_proj_ba.weight"],
            f"blk.{i}.ssm_conv1d.weight": tensors[f"{own}conv1d.weight"][:, 0],
            f"blk.{i}.ssm_a": -np.exp(tensors[f"{own}A_log"]),
            f"blk.{i}.ssm_dt.bias": tensors[f"{own}dt_bias"],
            f"blk.{i}.ssm_norm.weight": tensors[f"{own}norm.weight"],
            f"blk.{i}.ssm_out.weight": tensors[f"{own}out_proj.weight"],
        }
    return found


def lfm2_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    own = config["num_key_value_heads"]
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([own if attend else 0 for attend in attends])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_feed_forward_length(config["intermediate_size"])  # two thirds of it, rounded up


def lfm2(tensors: Tensors, config: dict) -> Tensors:
    found = {
        name: array[:, 0] if "shortconv.conv" in name else array
        for name, array in named(tensors, config).items()
    }
    return found | {"token_embd_norm.weight": tensors["embedding_norm.weight"]}


FAMILIES = {
    "lfm2": ("lfm2", lfm2_keys, lfm2),
    "ministral3": ("mistral3", ministral3_keys, turned),
    "qwen3_next": ("qwen3next", qwen3_next_keys, qwen3_next),
    "gemma3_text": ("gemma3", gemma3_keys, named),
    "glm4": ("glm4", glm4_keys, named),
    "granite": ("granite", granite_keys, turned),
    "olmo2": ("olmo2", dense_keys, named),
    "phi3": ("phi3", phi3_keys, phi3),
    "qwen2": ("qwen2", dense_keys, named),
    "smollm3": ("smollm3", dense_keys, turned),
    "gemma4_text": ("gemma4", gemma4_keys, gemma4),
    "gemma4_unified_text": ("gemma4", gemma4_keys, gemma4),
    "gpt_oss": ("gpt-oss", gpt_oss_keys, gpt_oss),
    "qwen3": ("qwen3", dense_keys, dense),
    "qwen3_5_moe_text": ("qwen35moe", qwen3_5_keys, qwen3_5),
    "qwen3_5_text": ("qwen35", qwen3_5_keys, qwen3_5),
    "qwen3_moe": ("qwen3moe", qwen3_moe_keys, qwen3_moe),
}

# --- K types, which the gguf package can read but not write -------------------------------------


def quantise_k(array: np.ndarray, kind: Q) -> np.ndarray:
    """Quantise rows of [..., 256 n] to the nearest codes, packed as in the format."""
    blocks = array.reshape(-1, 256).astype(np.float64)
    packed = {Q.Q4_K: _q4_k, Q.Q6_K: _q6_k}[kind](blocks)
    return packed.reshape(*array.shape[:-1], -1)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Eight runs of 32, each q * scale - least, both six bits of a factor for the block."""
    runs = blocks.reshape(-1, 8, 32)
    least = np.maximum(-runs.min(-1), 0)
    steps = (runs.max(-1) + least) / 15
    d, m = (np.float16(x.max(-1) / 63).astype(np.float64) for x in (steps, least))
    sc, mn = (
        np.clip(np.rint(x / np.maximum(f, 1e-12)[:, None]), 0, 63).astype(np.uint8)
        for x, f in ((steps, d), (least, m))
    )
    step = np.maximum(sc * d[:, None], 1e-12)[..., None]
    q = np.clip(np.rint((runs + (mn * m[:, None])[..., None]) / step), 0, 15).astype(np.uint8)
    scales = np.concatenate(
        [
            sc[:, :4] | (sc[:, 4:] >> 4 << 6),
            mn[:, :4] | (mn[:, 4:] >> 4 << 6),
            (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([_half(d), _half(m), scales, nibbles], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Sixteen runs of 16, each q * scale with an eight-bit scale; low and high bits apart."""
    runs = blocks.reshape(-1, 16, 16)
    steps = np.abs(runs).max(-1) / 32
    d = np.float16(steps.max(-1) / 127).astype(np.float64)
    sc = np.clip(np.rint(steps / np.maximum(d, 1e-12)[:, None]), 1, 127).astype(np.int8)
    step = np.maximum(sc * d[:, None], 1e-12)[..., None]
    q = (np.clip(np.rint(runs / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q & 15)[:, :, :2] | (q & 15)[:, :, 2:] << 4  # [n, half, 2, 32]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((q >> 4) << shifts, axis=2)  # [n, half, 32]
    parts = (low.reshape(-1, 128), high.reshape(-1, 64), sc.view(np.uint8), _half(d))
    return np.concatenate(parts, axis=1)


def log_scale(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights whose rows differ in size, as trained ones do."""
    rows = np.exp(0.5 * rng.standard_normal((*shape[:-1], 1)))
    return (rng.standard_normal(shape) * rows / math.sqrt(shape[-1])).astype(np.float32)
