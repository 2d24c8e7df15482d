"""Small random models and scripted drafters, for tests, notebooks and benchmarks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax import random_weights
from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig, read_json
from dflash_jax.engine.engine import Engine
from dflash_jax.families import drafter_kinds
from dflash_jax.families.gemma4 import Gemma4Config
from dflash_jax.families.gpt_oss import GptOssConfig
from dflash_jax.families.qwen3_5 import HybridConfig
from dflash_jax.families.qwen3_moe import Qwen3MoeConfig
from dflash_jax.graph import Graph
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.protocols import CacheMaker, Draft, DraftSampler, SharedLayers, with_kernels
from dflash_jax.graph.resolve import resolve
from dflash_jax.loading import OpenModel, expect
from dflash_jax.networks import build_pair
from dflash_jax.nn.layers import declare
from dflash_jax.plan import LEAST, Plan
from dflash_jax.quant.formats import KINDS, Spec
from dflash_jax.quant.layouts import LAID_OUT
from dflash_jax.random_weights import random_params as random_params

Config = TypeVar("Config", bound=TargetConfig)

AMPLE = 1 << 40  # bytes; random models are small
OWN = -1  # in a script: keep the drafter's own token
# XLA flags for compiling in a third of the time, to slower code that rounds differently.
QUICK_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):  # the only emitters of later versions
    QUICK_COMPILE.append("--xla_cpu_use_fusion_emitters=false")


def tiny_target(**changes: Any) -> TargetConfig:
    """Return a Qwen3 target of a few thousand parameters."""
    model_type = changes.get("model_type", "qwen3")
    num_layers = changes.get("num_layers", 3)
    config = TargetConfig(
        model_type=model_type,
        vocab_size=97,
        hidden_size=32,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_length=4096,
        qk_norm=model_type == "qwen3",
        windows=(None,) * num_layers,
    )
    return dataclasses.replace(config, **changes)


def tiny_hybrid(**changes: Any) -> HybridConfig:
    """Return a small Qwen3.5 target with recurrent, attention and recurrent layers."""
    config = HybridConfig(
        model_type="qwen3_5_text",
        vocab_size=97,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_length=4096,
        qk_norm=True,
        recurrent=(True, False, True),
        rotary_dim=2,
        key_heads=2,
        value_heads=4,
        key_width=8,
        value_width=6,
        conv_kernel=4,
    )
    return dataclasses.replace(config, **changes)


def _extended(cls: type[Config], **own: Any) -> Config:
    """Return a config of another family, with the fields of `tiny_target` and some of its own."""
    return cls(**vars(tiny_target()) | own)


def tiny_moe(**changes: Any) -> Qwen3MoeConfig:
    """Return a small Qwen3-MoE target with experts, dense and experts layers."""
    config = _extended(
        Qwen3MoeConfig,
        model_type="qwen3_moe",
        qk_norm=True,
        num_experts=8,
        experts_per_token=2,
        expert_size=24,
        sparse=(True, False, True),
        normalise_shares=True,
    )
    return dataclasses.replace(config, **changes)


def tiny_gpt_oss(**changes: Any) -> GptOssConfig:
    """Return a small gpt-oss target with sliding, full and sliding layers, all with experts."""
    config = _extended(
        GptOssConfig,
        model_type="gpt_oss",
        qk_norm=False,
        windows=(12, None, 12),
        attention_bias=True,
        num_experts=8,
        experts_per_token=2,
        expert_size=24,
        rope=RopeConfig(kind="yarn", factor=4.0, original_length=64, attention_factor=1.14),
    )
    return dataclasses.replace(config, **changes)


def tiny_gemma(**changes: Any) -> Gemma4Config:
    """Return a small Gemma 4 target that uses every feature of the family."""
    config = Gemma4Config(
        model_type="gemma4_text",
        vocab_size=97,
        hidden_size=32,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        full_kv_heads=1,
        full_head_dim=16,
        full_rope=RopeConfig(kind="proportional", theta=1e5, partial_rotary_factor=0.25),
        intermediate_size=48,
        windows=(10, None, 10, 10, None),
        tie_embeddings=False,  # with tied random tables the output repeats one token
        embedding_scale=32**0.5,
        final_softcap=4.0,
        key_is_value=True,
        shared_layers=2,
        shared_mlp_factor=2,
        num_experts=4,
        experts_per_token=2,
        expert_size=12,
        per_layer_size=6,
    )
    return dataclasses.replace(config, **changes)


# Fields of tiny drafters that are none of the common ones, by kind; others have their defaults.
TINY_HEADS: dict[str, dict[str, Any]] = {
    "dflash2": {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 4},
    "dspark": {"markov_rank": 8, "confidence_head": True},
    "domino": {"gru_hidden_dim": 12, "emb_dim": 8, "sample_from_anchor": True},
}


def tiny_drafter(target: TargetConfig, kind: str = "dflash", **changes: Any) -> DrafterConfig:
    """Return a two-layer drafter for a target: a sliding causal layer and a full one."""
    config = drafter_kinds()[kind].config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        block_size=8,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, 1),
        num_target_layers=target.num_layers,
        windows=(12, None),
        causal=(True, False),
        **TINY_HEADS.get(kind, {}),
    )
    return dataclasses.replace(config, **changes)


def folder_params(
    directory: str | Path, config: TargetConfig | DrafterConfig, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the parameters in a Hugging Face folder, as NumPy arrays, by a given configuration.

    Raises:
      CheckpointError: the weights are not those of the configuration.
    """
    from dflash_jax import families
    from dflash_jax.converters import hf, hf_quantised
    from dflash_jax.converters.load import load
    from dflash_jax.converters.names import huggingface

    source = hf.open_directory(directory)
    where = Path(directory) / "config.json"
    if isinstance(config, DrafterConfig):
        tensors = huggingface.drafter(source, config)
    else:
        stored = read_json(where).get("quantization_config")
        source = hf_quantised.dequantised(source, stored, where=str(where))
        folder = families.folder(config)
        tensors = huggingface.target(source, tied=config.tie_embeddings, folder=folder)
    return load(tensors, config, dtype, where=str(directory))


def stored(model: OpenModel) -> dict[str, Spec]:
    """Return how the file of a target packs the matrices that can be used so, by path."""
    forms = planned(expect(TargetConfig, model.config), None, Plan()).forms
    paths = [path for path, form in forms.items() if form in LAID_OUT]
    return model.stored({path.removeprefix("target/") for path in paths})


def planned(target: TargetConfig, drafter: DrafterConfig | None, plan: Plan) -> PlannedPair:
    """Return the modules of both configs under a plan; nothing is checked.

    Choices that the plan leaves open are those of `plan.LEAST`.
    """
    chosen: dict[str, Any] = {}
    for name, field in plan.fields().items():
        value = getattr(plan, name)
        if not (field.automatic and value in (0, "auto")):
            chosen[name] = value
    return PlannedPair(build_pair(target, drafter), dataclasses.replace(LEAST, **chosen))


def random_engine(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    plan: Plan,
    *,
    seed: int = 0,
) -> Engine:
    """Return an engine with random weights, planned for a CPU."""
    pair = build_pair(target, drafter)
    plan = resolve(plan, pair, platform="cpu", memory=AMPLE)
    return random_weights.engine(Graph(pair, plan), seed=seed)


def _of_overruled(name: str) -> Any:
    """Return a property that is an optional member of the replaced drafter."""
    return property(lambda self: getattr(self.overruled, name))


class Scripted(nn.Module):
    """A drafter whose drafts are replaced by a script, a parameter [rows, positions, 2].

    The whole drafter runs, whatever its kind; then each draft is replaced by the script's token
    for its position. The target's own continuation as script gives perfect drafts, errors in it
    force an acceptance pattern, and non-finite entries simulate a broken drafter.

    The script has token ids as base-256 digits, because ids above 256 are not exact in bfloat16.
    Negative numbers keep the drafter's own token.

    Attributes:
      overruled: the drafter, a Linen module; its parameters are among those of this one.
      rows, length: size of the script.
    """

    overruled: Any
    rows: int = 1
    length: int = 64
    kernels: str = "xla"

    config = _of_overruled("config")
    taps = _of_overruled("taps")
    block = _of_overruled("block")
    trained_block = _of_overruled("trained_block")
    reads = _of_overruled("reads")
    predicts_confidence = _of_overruled("predicts_confidence")

    def setup(self) -> None:
        """Declare the weights."""
        self.drafter = with_kernels(self.overruled, self.kernels)
        nn.share_scope(self, self.drafter)
        shape = (self.rows, self.length, 2)
        self.script = declare(self, "script", nn.initializers.zeros, shape)

    def empty(self, make: CacheMaker) -> Any:
        """Return the empty state of the replaced drafter."""
        return self.overruled.empty(make)

    def observe(
        self,
        state: Any,
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
    ) -> Any:
        """Return the state of the replaced drafter after these tokens."""
        return self.drafter.observe(state, tokens, taps, start)

    def propose(
        self,
        state: Any,
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, Any]:
        """Replace each scripted token of the drafter's proposal, with probability 1."""
        proposal, state = self.drafter.propose(state, anchor, start, shared, sampler)
        assert proposal.finite is not None
        at = start[:, None] + jnp.arange(1, proposal.block.shape[1])[None, :]
        digits = self.script[: len(anchor)].astype(jnp.float32)
        script = digits[:, :, 0] * 256 + digits[:, :, 1]
        said = jnp.take_along_axis(script, jnp.minimum(at, script.shape[1] - 1), axis=1)
        clear = jnp.isfinite(said)
        scripted = clear & (said >= 0)
        # Taking the drafter's own token elsewhere keeps all of its work alive in the program.
        tokens = jnp.where(scripted, jnp.nan_to_num(said).astype(jnp.int32), proposal.block[:, 1:])
        draft = sampler.draft(tokens, proposal.finite & clear.all(axis=1))
        return dataclasses.replace(draft, num_drafts=proposal.num_drafts), state


def scripted_engine(engine: Engine) -> Engine:
    """Return an engine with the same weights whose drafter proposes the tokens of `set_script`."""
    plan = engine.plan
    pair = engine.graph.pair
    length = plan.max_length + plan.block
    scripted = Scripted(pair.drafter, rows=plan.rows, length=length)
    graph = Graph(dataclasses.replace(pair, drafter=scripted), plan)
    drafter = engine.params["drafter"] | {"script": _digits(engine.plan.rows, length, [], engine)}
    params = engine.params | {"drafter": drafter}
    return Engine(graph, params, tokenizer=engine.tokenizer)


def set_script(engine: Engine, tokens: Sequence[float]) -> None:
    """Make a scripted drafter propose `tokens[p]` for position p, in every row."""
    rows, length = engine.params["drafter"]["script"].shape[:2]
    engine.params["drafter"]["script"] = _digits(rows, length, tokens, engine)


def set_row_scripts(engine: Engine, scripts: Mapping[int, Sequence[float]]) -> None:
    """Make a scripted drafter propose `scripts[row][p]` for position p.

    The drafter's own tokens are kept in rows without a script, at positions past the end of one,
    and where a script has `OWN`. May be called while requests run.
    """
    rows, length = engine.params["drafter"]["script"].shape[:2]
    padded = np.full((rows, length), OWN, float)
    for row, tokens in scripts.items():
        padded[row, : len(tokens)] = tokens[:length]
    engine.params["drafter"]["script"] = _as_digits(padded, engine)


def packed_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a packed weight [D, ...]."""
    columns = math.prod(shape[1:])
    rows = KINDS[kind].arrays(shape[0]).values()
    return sum(count * columns * np.dtype(dtype).itemsize for count, dtype in rows)


def force_acceptance(
    tokens: Sequence[int], prompt_tokens: int, pattern: Sequence[int], vocab_size: int
) -> list[int]:
    """Return a script with which successive rounds accept the numbers of drafts in `pattern`.

    Args:
      tokens: the prompt and the target's continuation of it.
      pattern: accepted drafts per round, repeated as needed.
    """
    script = list(tokens)
    at = prompt_tokens  # position of the round's anchor
    for i in range(len(tokens)):
        at += pattern[i % len(pattern)] + 1
        if at >= len(tokens):
            break
        script[at] = (script[at] + 1) % vocab_size
    return script


def _digits(rows: int, length: int, tokens: Sequence[float], engine: Engine) -> jax.Array:
    padded = np.zeros(length)
    padded[: len(tokens)] = tokens[:length]
    return _as_digits(np.broadcast_to(padded, (rows, length)), engine)


def _as_digits(tokens: np.ndarray, engine: Engine) -> jax.Array:
    digits = np.stack([tokens // 256, tokens % 256], axis=-1)
    return jax.device_put(digits.astype(jax.numpy.dtype(engine.plan.compute_dtype)))
