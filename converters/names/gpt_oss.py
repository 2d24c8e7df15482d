"""gpt-oss: biases, sinks, and stacked experts whose gates and ups alternate."""

from dflash_jax.config.gpt_oss import GptOssConfig
from dflash_jax.converters.names import llama
from dflash_jax.converters.names.slots import Part, Path, Slot, linear, same


def slots(config: GptOssConfig) -> list[Slot]:
    """Every parameter of the target."""
    width = config.hidden_size
    found = [
        *llama.tables(config),
        same(("norm",), "norm.weight", width),
    ]
    for i in range(config.num_layers):
        at, source = (f"layers_{i}",), f"layers.{i}."
        found += [
            same((*at, "input_norm"), f"{source}input_layernorm.weight", width),
            same((*at, "post_attention_norm"), f"{source}post_attention_layernorm.weight", width),
            *llama.attention(config, (*at, "attention"), f"{source}self_attn."),
            _sinks(config, (*at, "attention"), f"{source}self_attn."),
            *_experts(config, (*at, "mlp"), f"{source}mlp."),
        ]
    return found


def _sinks(config: GptOssConfig, at: Path, source: str) -> Slot:
    shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    part = Part(f"{source}sinks", (config.num_heads,), (0, 1))
    return Slot((*at, "sinks"), shape, (part,))


def _experts(config: GptOssConfig, at: Path, source: str) -> list[Slot]:
    """Router and experts; stored [E, D, 2F] and [E, F, D], inputs first, unlike linear weights."""
    count, width, size = config.num_experts, config.hidden_size, config.expert_size
    weight = Part(f"{source}experts.gate_up_proj", (count, width, 2 * size), (0, 1, 3, 2))
    bias = Part(f"{source}experts.gate_up_proj_bias", (count, 2 * size), (0, 2, 1))
    return [
        linear((*at, "router"), f"{source}router.weight", count, width),
        same((*at, "router_bias"), f"{source}router.bias", count),
        Slot((*at, "experts_gate_up"), (count, width, 2, size), (weight,)),
        Slot((*at, "experts_gate_up_bias"), (count, 2, size), (bias,)),
        same((*at, "experts_down"), f"{source}experts.down_proj", count, size, width),
        same((*at, "experts_down_bias"), f"{source}experts.down_proj_bias", count, width),
    ]
