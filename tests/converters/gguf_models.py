"""Oracle models written to GGUF by the gguf package, with the published transforms.

Independent of our tables: the names, the row order and the rotary divisors are spelt out here.
"""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

Q = gguf.GGMLQuantizationType
LAYER = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
]


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: Q) -> None:
    """Add a tensor quantised as by llama.cpp: norms stay F32, rows that do not fit become Q8_0."""
    if array.ndim == 1 or kind == Q.F32:
        writer.add_tensor(name, array.astype(np.float32))
        return
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Per head: row i of the first half to 2i, of the second half to 2i + 1."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def rope_divisors(rope: dict, width: int) -> np.ndarray:
    """One divisor for each rotary frequency, by cases."""
    found = []
    for m in range(width // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * m / width)
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        if wavelength < original / rope["high_freq_factor"]:
            found.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            found.append(factor)
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def hyperparameters(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)


def write_target(folder: Path, path: Path, kind: Q = Q.F32, *, fused: bool = False) -> Path:
    """A Hugging Face target as llama.cpp's converter would write it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, config["model_type"])
    hyperparameters(writer, config)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        add(writer, "rope_freqs.weight", rope_divisors(rope, config["head_dim"]), Q.F32)
    add(writer, "token_embd.weight", tensors["model.embed_tokens.weight"], kind)
    add(writer, "output_norm.weight", tensors["model.norm.weight"], kind)
    if "lm_head.weight" in tensors:
        add(writer, "output.weight", tensors["lm_head.weight"], kind)
    for i in range(config["num_hidden_layers"]):
        layer = {}
        for theirs, ours in LAYER:
            array = tensors.get(f"model.layers.{i}.{theirs}.weight")
            if (
                array is not None
                and config["model_type"] == "llama"
                and ours in ("attn_q", "attn_k")
            ):
                key = "num_attention_heads" if ours == "attn_q" else "num_key_value_heads"
                array = interleave(array, config[key])
            if array is not None:
                layer[ours] = array
        if fused:
            parts = [layer.pop(f"attn_{x}") for x in "qkv"]
            layer["attn_qkv"] = np.concatenate(parts)
        for name, array in layer.items():
            add(writer, f"blk.{i}.{name}.weight", array, kind)
    finish(writer)
    return path


NAMES = {
    "upstream": {
        "architecture": "dflash",
        "fc": "fc",
        "hidden_norm": "enc.output_norm",
        "post": "ffn_norm",
        "settings": "dflash.",
        "taps": ("dflash.target_layers", 1),
        "mask": "tokenizer.ggml.mask_token_id",
    },
    "dflash-draft": {
        "architecture": "dflash-draft",
        "fc": "dflash_fc",
        "hidden_norm": "dflash_hidden_norm",
        "post": "post_attention_norm",
        "settings": "dflash-draft.dflash.",
        "taps": ("dflash-draft.dflash.target_layer_ids", 0),
        "mask": "dflash-draft.dflash.mask_token_id",
    },
    "lucebox": {
        "architecture": "qwen35-dflash-draft",
        "fc": "dflash.fc",
        "hidden_norm": "dflash.hidden_norm",
        "post": "ffn_norm",
        "settings": "qwen35-dflash-draft.dflash.",
        "taps": ("qwen35-dflash-draft.dflash.target_layer_ids", 0),
        "mask": "qwen35-dflash-draft.dflash.mask_token_id",
    },
}


HEADS = {  # of DFlash 2 and DSpark, as llama.cpp names them
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
}
CONVOLUTIONS = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def add_heads(writer: gguf.GGUFWriter, config: dict, tensors: dict[str, np.ndarray]) -> None:
    """Add the heads of DFlash 2 and DSpark; a reduced vocabulary is a list of ids."""
    for key in SIZES:
        if key in config["dflash_config"]:
            writer.add_uint32(f"dflash.{key}", config["dflash_config"][key])
    if "markov_head.markov_w1.weight" in tensors:
        writer.add_bool("dflash.sample_from_anchor", True)
        writer.add_bool("dflash.has_confidence_head", True)
    for theirs, ours in HEADS.items():
        if theirs in tensors:
            add(writer, ours, tensors[theirs], Q.F32)
    for i in range(config["num_hidden_layers"]):
        for theirs, ours in CONVOLUTIONS.items():
            if (array := tensors.get(f"layers.{i}.{theirs}")) is not None:
                add(writer, f"blk.{i}.{ours}", array, Q.F32)
    if "d2t" in tensors:
        ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
        writer.add_tensor("d2t", ids.astype(np.int64))


def write_drafter(
    folder: Path, path: Path, dialect: str, kind: Q = Q.F32, *, taps: list[int] | None = None
) -> Path:
    """A z-lab drafter folder in one of the published GGUF dialects."""
    spelt = NAMES[dialect]
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    architecture = spelt["architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    hyperparameters(writer, config)
    own = config["dflash_config"]
    writer.add_uint32(f"{spelt['settings']}block_size", config.get("block_size", 16))
    key, shift = spelt["taps"]
    writer.add_array(key, [i + shift for i in taps or own["target_layer_ids"]])
    writer.add_uint32(spelt["mask"], own["mask_token_id"])
    writer.add_uint32(f"{architecture}.vocab_size", config["vocab_size"])
    if config.get("use_sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(pattern)
    if dialect == "upstream" and "is_causal" in config:
        writer.add_causal_attention(config["is_causal"])
    add(writer, f"{spelt['fc']}.weight", tensors["fc.weight"], kind)
    add(writer, f"{spelt['hidden_norm']}.weight", tensors["hidden_norm.weight"], kind)
    add(writer, "output_norm.weight", tensors["norm.weight"], kind)
    add_heads(writer, config, tensors)
    for i in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER:
            name = spelt["post"] if ours == "ffn_norm" else ours
            add(writer, f"blk.{i}.{name}.weight", tensors[f"layers.{i}.{theirs}.weight"], kind)
    finish(writer)
    return path
