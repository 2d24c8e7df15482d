"""What the models are: frozen descriptions of a target and of a drafter.

Hugging Face `config.json` files (as published and as transformers 5 writes them) become
configs here. A field that is neither understood nor known to be harmless is refused by name.
This module never imports jax.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Self

from dflash_jax.errors import CheckpointError, ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
TARGET_TYPES = ("llama", "qwen3")

# Fields that describe training, generation defaults or packaging, not the forward pass.
_HARMLESS = frozenset(
    [
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "max_position_embeddings",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are rescaled."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear, llama3, yarn
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention geometry that targets and drafters share."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope: RopeConfig = RopeConfig()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value"
                " heads; the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; `from_json` is the inverse."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The config written by `to_json`; unknown fields are refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        if extra := sorted(set(fields) - known):
            raise ConfigError(f"unknown {cls.__name__} fields {extra}; known are {sorted(known)}")
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        values["rope"] = RopeConfig(**fields["rope"])
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(AttentionConfig):
    """A target language model."""

    model_type: str
    vocab_size: int
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()  # per layer; None sees everything
    max_length: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the published weights

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before rotation."""
        return self.model_type == "qwen3"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(AttentionConfig):
    """A DFlash v1 drafter; it borrows embedding and head from its target."""

    kind: str = "dflash"  # the file in models/ that builds it
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of decoder layer i, counted from 0
    num_target_layers: int
    windows: tuple[int | None, ...]  # per layer; None sees everything
    causal: tuple[bool, ...]  # per layer, inside the block
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dtype: str = "float32"


class _Fields:
    """Reads a JSON object and remembers what was read, so that leftovers can be refused."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where, self.used = values, where, set()

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.where} lacks {name!r}; add it as an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected a number")
        return float(value)

    def must_be(self, name: str, *allowed: Any) -> None:
        value = self.get(name, allowed[0])
        if value not in allowed:
            names = ", ".join(map(repr, allowed))
            raise ConfigError(f"{self.where}: {name} is {value!r}; only {names} is supported")

    def inner(self, name: str) -> "_Fields":
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected an object")
        return _Fields(value, f"{self.where}: {name}")

    def refuse_rest(self) -> None:
        rest = [k for k, v in self.values.items() if v is not None]
        if rest := sorted(set(rest) - self.used - _HARMLESS):
            raise ConfigError(
                f"{self.where} has fields this version does not understand: {', '.join(rest)}."
                " They could change the output, so they are not ignored"
            )


def target_config(fields: dict[str, Any], where: str = "config.json") -> TargetConfig:
    """The target described by a Hugging Face config; raises ConfigError for anything unknown."""
    model_type = fields.get("model_type")
    if model_type not in TARGET_TYPES:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not a target this version runs;"
            f" it runs {', '.join(sorted(TARGET_TYPES))}"
        )
    f = _Fields(fields, where)
    f.get("model_type")
    f.must_be("hidden_act", "silu")
    f.must_be("mlp_bias", False)
    geometry = _geometry(f)
    windows = _windows(f, geometry["num_layers"])
    config = TargetConfig(
        model_type=model_type,
        vocab_size=f.integer("vocab_size"),
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        windows=tuple(window for _, window in windows),
        max_length=f.integer("max_position_embeddings", 4096),
        eos_token_ids=_ids(f.get("eos_token_id")),
        dtype=_dtype(f),
        **geometry,
    )
    f.refuse_rest()
    return config


def drafter_config(fields: dict[str, Any], where: str = "config.json") -> DrafterConfig:
    """The DFlash v1 drafter described by a published config.

    Drafter fields are looked up in `dflash_config` first, then at the top level (dflash 0.1.0).
    A sliding layer is causal inside its block unless the config says `is_causal`.
    """
    f = _Fields(fields, where)
    kinds = f.get("architectures", ["DFlashDraftModel"])
    if list(kinds) != ["DFlashDraftModel"]:
        raise ConfigError(f"{where}: architectures is {kinds}; expected ['DFlashDraftModel']")
    f.must_be("model_type", "qwen3")
    f.must_be("hidden_act", "silu")
    dflash = f.inner("dflash_config")

    def pick(name: str) -> _Fields:
        f.used.add(name)
        return dflash if dflash.get(name) is not None else f

    taps = pick("target_layer_ids").get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
        raise ConfigError(
            f"{where}: target_layer_ids is {taps!r}; expected the list of target layers whose"
            " outputs the drafter reads (it cannot be guessed safely)"
        )
    softcap = pick("final_logit_softcapping").number("final_logit_softcapping", 0.0)
    geometry = _geometry(f)
    layers = _windows(f, geometry["num_layers"])
    is_causal = f.get("is_causal")
    vocab_size = f.integer("vocab_size")
    config = DrafterConfig(
        vocab_size=vocab_size,
        block_size=pick("block_size").integer("block_size", 16),
        mask_token_id=pick("mask_token_id").integer("mask_token_id"),
        target_layer_ids=tuple(taps),
        num_target_layers=f.integer("num_target_layers", 0),
        windows=tuple(window for _, window in layers),
        causal=tuple(
            kind == SLIDING if is_causal is None else bool(is_causal) for kind, _ in layers
        ),
        input_embedding_scale=pick("input_embedding_scale").number("input_embedding_scale", 1.0),
        output_multiplier=pick("output_multiplier").number("output_multiplier", 1.0),
        final_logit_softcapping=softcap if softcap > 0 else None,
        dtype=_dtype(f),
        **geometry,
    )
    f.refuse_rest()
    dflash.refuse_rest()
    return config


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raises ConfigError, naming every reason, when the drafter was not made for this target."""
    layers = range(target.num_layers)
    outside = [i for i in drafter.target_layer_ids if i not in layers]
    reasons = []
    if drafter.hidden_size != target.hidden_size:
        reasons.append(f"hidden size {drafter.hidden_size}, the target has {target.hidden_size}")
    if drafter.vocab_size != target.vocab_size:
        reasons.append(f"vocabulary {drafter.vocab_size}, the target has {target.vocab_size}")
    if drafter.num_target_layers not in (0, target.num_layers):
        reasons.append(
            f"made for {drafter.num_target_layers} target layers, this one has {target.num_layers}"
        )
    if outside:
        reasons.append(f"reads target layers {outside}, the target has layers 0 to {layers[-1]}")
    if target.num_layers - 1 in drafter.target_layer_ids:
        reasons.append(
            f"reads the last target layer ({target.num_layers - 1}), which is ambiguous: other"
            " engines take it before or after the final norm"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        reasons.append(
            f"mask token {drafter.mask_token_id} is outside the target's vocabulary"
            f" of {target.vocab_size}"
        )
    if reasons:
        raise ConfigError(
            "the drafter does not fit the target: " + "; ".join(reasons) + ". Load the drafter"
            " that was trained for this target"
        )


def _geometry(f: _Fields) -> dict[str, Any]:
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    return {
        "hidden_size": hidden,
        "num_layers": f.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": f.integer("num_key_value_heads", heads),
        "head_dim": f.integer("head_dim", hidden // max(heads, 1)),
        "intermediate_size": f.integer("intermediate_size"),
        "rms_norm_eps": f.number("rms_norm_eps", 1e-6),
        "attention_bias": bool(f.get("attention_bias", False)),
        "rope": _rope(f),
    }


def _rope(f: _Fields) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, or `rope_parameters` with the base inside."""
    outer_theta = f.number("rope_theta", 10000.0)
    old, new = f.inner("rope_scaling"), f.inner("rope_parameters")
    r = new if new.values else old
    kind = r.get("rope_type", r.get("type", "default"))
    r.used.update(("rope_type", "type"))
    theta, factor = r.number("rope_theta", outer_theta), r.number("factor", 1.0)
    original = r.integer("original_max_position_embeddings", 0)
    original = original or f.integer("max_position_embeddings", 0)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(
            f"{f.where}: rope type {kind!r} is not supported; default, linear, llama3, yarn are"
        )
    extra: dict[str, Any] = {}
    if kind == "llama3":
        extra = {
            "low_freq_factor": r.number("low_freq_factor", 1.0),
            "high_freq_factor": r.number("high_freq_factor", 4.0),
        }
    elif kind == "yarn":
        extra = {
            "beta_fast": r.number("beta_fast", 32.0),
            "beta_slow": r.number("beta_slow", 1.0),
            "truncate": bool(r.get("truncate", True)),
            "attention_factor": r.number("attention_factor", 0.1 * math.log(factor) + 1.0),
        }
    r.refuse_rest()
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_length=original, **extra)


def _windows(f: _Fields, num_layers: int) -> list[tuple[str, int | None]]:
    """Kind and window of each layer; Qwen3's window counts only with `use_sliding_window`."""
    window = f.get("sliding_window")
    enabled = f.get("use_sliding_window", f.values.get("model_type") != "qwen3")
    first = f.integer("max_window_layers", num_layers)
    if not enabled:
        window = None
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"{f.where}: sliding_window is {window!r}; expected a positive integer")
    default = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    kinds = f.get("layer_types", default)
    if len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise ConfigError(
            f"{f.where}: layer_types is {kinds}; expected {num_layers} entries of"
            f" {FULL!r} or {SLIDING!r}"
        )
    return [(kind, window if kind == SLIDING else None) for kind in kinds]


def _dtype(f: _Fields) -> str:
    name = f.get("dtype", f.get("torch_dtype", "float32"))
    f.used.update(("dtype", "torch_dtype"))
    return str(name).removeprefix("torch.")


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if absent, ConfigError if it is no object."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give a folder that holds {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def read_target_config(directory: Path) -> TargetConfig:
    """The target in a Hugging Face directory, end tokens completed from generation_config.json."""
    config = target_config(read_json(directory / "config.json"), str(directory / "config.json"))
    generation = directory / "generation_config.json"
    extra = _ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    ids = tuple(dict.fromkeys(config.eos_token_ids + extra))
    return dataclasses.replace(config, eos_token_ids=ids)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """The drafter in a Hugging Face directory."""
    return drafter_config(read_json(directory / "config.json"), str(directory / "config.json"))
