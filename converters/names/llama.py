"""Llama: decoder layers with two norms, grouped attention and a gated MLP."""

from dflash_jax.config import AttentionConfig, TargetConfig
from dflash_jax.converters.names.slots import Part, Path, Slot, by_head, linear, paired, same


def slots(config: TargetConfig) -> list[Slot]:
    """Every parameter of the target."""
    found = [
        *tables(config),
        same(("norm",), "norm.weight", config.hidden_size),
    ]
    for i in range(config.num_layers):
        found += layer(config, i)
    return found


def tables(config: TargetConfig) -> list[Slot]:
    """The embedding table and the head; a tied head is both."""
    width, vocab = config.hidden_size, config.vocab_size
    if config.tie_embeddings:
        return [linear(("head",), "embed_tokens.weight", vocab, width)]
    return [
        linear(("embed",), "embed_tokens.weight", vocab, width),
        linear(("head",), "lm_head.weight", vocab, width),
    ]


def layer(config: AttentionConfig, i: int) -> list[Slot]:
    """The parameters of decoder layer `i`."""
    at, source = (f"layers_{i}",), f"layers.{i}."
    width = config.hidden_size
    return [
        same((*at, "input_norm"), f"{source}input_layernorm.weight", width),
        *attention(config, (*at, "attention"), f"{source}self_attn."),
        *norm_and_mlp(config, at, source),
    ]


def attention(config: AttentionConfig, at: Path, source: str) -> list[Slot]:
    """Fused query, key and value, and the output projection."""
    width, groups, head = config.hidden_size, config.num_kv_heads, config.head_dim
    count = (config.num_heads // groups, 1, 1)
    names = [f"{source}{x}_proj" for x in "qkv"]
    weights = tuple(f"{n}.weight" for n in names)
    found = [
        by_head((*at, "qkv"), weights, count, groups, head, width),
        linear((*at, "o"), f"{source}o_proj.weight", width, config.num_heads * head),
    ]
    if config.attention_bias:
        biases = tuple(f"{n}.bias" for n in names)
        found.append(by_head((*at, "qkv_bias"), biases, count, groups, head))
        found.append(same((*at, "o_bias"), f"{source}o_proj.bias", width))
    return found


def norm_and_mlp(config: AttentionConfig, at: Path, source: str) -> list[Slot]:
    """The second norm of a layer and its gated MLP."""
    width, inner = config.hidden_size, config.intermediate_size
    gate_up = (f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
    norm = f"{source}post_attention_layernorm.weight"
    found = [
        same((*at, "post_attention_norm"), norm, width),
        paired((*at, "mlp", "gate_up"), gate_up, inner, width),
        linear((*at, "mlp", "down"), f"{source}mlp.down_proj.weight", width, inner),
    ]
    if isinstance(config, TargetConfig) and config.mlp_bias:
        names = (f"{source}mlp.gate_proj.bias", f"{source}mlp.up_proj.bias")
        parts = tuple(Part(name, (inner,), (0, 1), (i,)) for i, name in enumerate(names))
        found.append(Slot((*at, "mlp", "gate_up_bias"), (2, inner), parts))
        found.append(same((*at, "mlp", "down_bias"), f"{source}mlp.down_proj.bias", width))
    return found
