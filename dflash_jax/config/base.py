"""Fields that families share: attention geometry, layer windows, experts."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self, TypeVar

from dflash_jax.config.fields import Fields, integer, whole
from dflash_jax.config.rope import PLAIN, RopeConfig, longest, made_for, rope_config
from dflash_jax.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
MOST_EXPERTS = 4096
WIDEST_HEAD = 65536
MOST_LAYERS = 10_000  # bounds lists that a damaged file asks for
PER_LAYER = ("windows", "causal", "recurrent", "sparse")  # fields with an entry for each layer
NO_WINDOW = -(2**31) + 1  # value of null

# Parameters, by the last part of their path, that are float32 whatever the dtype of the others:
# an exponent's rounding error would grow with every token in a recurrent state.
ALWAYS_FLOAT32 = ("a_log",)

# Where drafters take a layer's output: before the operations that some families apply after the
# residual additions (per-layer inputs, layer scalars), after these, or as in Hugging Face's hidden
# states: late, but after the final norm for the last layer. AUTO is late without a last layer.
AUTO, EARLY, LATE, UPSTREAM = TAPS_AT = ("auto", "early", "late", "upstream")


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
    rope: RopeConfig = PLAIN

    def __post_init__(self) -> None:
        at_least(self, 1, "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        at_least(self, 0, "intermediate_size")  # 0 where all layers have experts
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"num_layers is {self.num_layers}; expected up to {MOST_LAYERS:,}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value"
                " heads; the first must be a multiple of the second"
            )
        if self.head_dim % 2 or self.head_dim > WIDEST_HEAD:
            raise ConfigError(
                f"head_dim is {self.head_dim}; rotary embedding needs an even number, up to"
                f" {WIDEST_HEAD}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; `from_json` is the inverse."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the config that `to_json` wrote.

        Raises:
          ConfigError: a field is unknown, or has another type or length.
        """
        values = _typed(cls, fields)
        layers = values.get("num_layers")
        for name in PER_LAYER:
            if values.get(name) and len(values[name]) != layers:
                raise ConfigError(f"{name} has {len(values[name])} entries for {layers} layers")
        return cls(**values)


def at_least(config: Any, least: int, *names: str) -> None:
    """Check that fields have at least a value.

    Raises:
      ConfigError: one of them is less.
    """
    for name in names:
        if (value := getattr(config, name)) < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _typed(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON values to the types of a config class, or raise ConfigError."""
    kinds = typing.get_type_hints(cls)
    values = {}
    if extra := sorted(set(fields) - set(kinds)):
        raise ConfigError(f"unknown {cls.__name__} fields {extra}; known are {sorted(kinds)}")
    for name, value in fields.items():
        if kinds[name] is RopeConfig and isinstance(value, dict):
            value = RopeConfig(**_typed(RopeConfig, value))
        value = tuple(value) if isinstance(value, list) else value
        if not _fits(value, kinds[name]):
            raise ConfigError(f"{name} is {value!r}; expected {kinds[name]}")
        values[name] = value
    return values


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has an annotated type; integers are accepted as floats."""
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in kind.__args__)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(one, kind.__args__[0]) for one in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) < math.inf
    return type(value) is kind


Extended = TypeVar("Extended", bound=AttentionConfig)
NO_TOKEN = (-1, 2**32 - 1)  # how files write that there is none


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(AttentionConfig):
    """A target language model."""

    model_type: str
    vocab_size: int
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()  # per layer; None is full attention
    max_length: int = 4096
    eos_token_ids: tuple[int, ...] = ()  # -1 and 2^32 - 1, which mean none, are dropped
    # Ids that only other engines read, kept for folders that are written; None is none.
    bos_token_id: int | None = dataclasses.field(default=None, compare=False)
    pad_token_id: int | None = dataclasses.field(default=None, compare=False)
    dtype: str = "float32"  # dtype of the published weights
    qkv_bias: bool = False  # queries, keys and values have biases, whatever the output has
    mlp_bias: bool = False  # gate, up and down have biases
    qk_norm: bool = False  # queries and keys are normalised per head before rotation
    joint_norm: bool = False  # they are normalised over all heads together, instead
    norm_before: bool = True  # attention and MLP read the normalised stream
    norm_after: bool = False  # their outputs are normalised
    rotated: int = 0  # number of leading dimensions of a head that rotate; 0 is all
    rotated_neighbours: bool = False  # pairs (2m, 2m + 1) rotate, not (m, m + half)
    score_scale: float | None = None  # factor of attention scores; None is 1 / sqrt(head_dim)
    query_growth: float = 0.0  # queries are times 1 + this log(1 + position // original_length)
    residual_scale: float = 1.0  # factor of what attention and MLP add to the stream
    num_experts: int = 0  # per layer with experts
    experts_per_token: int = 0
    expert_size: int = 0  # width of each expert's MLP
    embedding_scale: float = 1.0  # factor of table rows, rounded to the weights' dtype
    final_softcap: float | None = None  # logits become cap tanh(logits / cap)
    logit_divisor: float = 1.0  # divisor of the head's output

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "vocab_size")
        if not 0 <= self.rotated <= self.head_dim or self.rotated % 2:
            raise ConfigError(
                f"{self.rotated} of {self.head_dim} dimensions are to be rotated; expected an even"
                " number of them"
            )
        ends = tuple(i for i in self.eos_token_ids if i not in NO_TOKEN)
        if wrong := [i for i in ends if not 0 <= i < self.vocab_size]:
            raise ConfigError(
                f"the end token {wrong[0]} is not one of the {self.vocab_size} tokens; correct"
                " eos_token_id in config.json or generation_config.json, or of the .gguf file"
            )
        object.__setattr__(self, "eos_token_ids", ends)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Descriptions of the layers."""
        return window_kinds(self.windows or (None,) * self.num_layers)

    @property
    def conventions(self) -> tuple[str, ...]:
        """Descriptions of what is special in the family."""
        places = "before and after" if self.norm_before else "after"
        applies_by_text = {
            "queries and keys normed": self.qk_norm,
            "queries and keys normed over all heads": self.joint_norm,
            "biases of queries, keys and values": self.qkv_bias,
            f"norms {places} attention and MLP": self.norm_after,
            f"{self.rotated} of {self.head_dim} dimensions rotated": self.rotated,
            f"embedding x{self.embedding_scale:g}": self.embedding_scale != 1,
            f"scores x{self.score_scale or 0:g}": self.score_scale is not None,
            f"queries grow from position {self.rope.original_length:,}": self.query_growth,
            f"residuals x{self.residual_scale:g}": self.residual_scale != 1,
            f"logits / {self.logit_divisor:g}": self.logit_divisor != 1,
        }
        return tuple(text for text, applies in applies_by_text.items() if applies)

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has a rotary embedding."""
        return True

    def window_rope(self, window: int | None) -> RopeConfig:
        """Return the rotary embedding of the layers that have one, and this window."""
        return self.rope


def window_kinds(windows: tuple[int | None, ...]) -> tuple[str, ...]:
    """Return descriptions of attention layers."""
    return tuple("full attention" if w is None else f"window {w}" for w in windows)


def extended(config: AttentionConfig, cls: type[Extended], **own: Any) -> Extended:
    """Return a config of a class with further fields.

    Args:
      config: has the other fields.
      own: values of further fields, and of those that differ.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return cls(**values | own)


def dense_config(f: Fields, *, tied: bool = False, rotated: int | None = None) -> TargetConfig:
    """Return the config that all decoders with SiLU-gated layers share.

    Args:
      tied: whether the head is the embedding table where the config does not say.
      rotated: number of dimensions of a head that rotate; None is all.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    f.must_be("hidden_act", "silu", "swish")
    size = geometry(f, rotated=rotated)
    windows = layer_windows(f, size.num_layers)
    return extended(
        size,
        TargetConfig,
        model_type=f.get("model_type"),
        vocab_size=f.integer("vocab_size"),
        tie_embeddings=f.flag("tie_word_embeddings", tied),
        windows=tuple(window for _, window in windows),
        max_length=longest(size.rope, made_for(f) or 4096),
        eos_token_ids=id_tuple(f.get("eos_token_id")),
        dtype=dtype_name(f),
    )


class ExpertSizes(NamedTuple):
    """Numbers and width of the experts of a layer.

    Attributes:
      total: number of experts.
      chosen: number of experts that a token chooses.
      size: width of each expert's MLP.
    """

    total: int = 0
    chosen: int = 0
    size: int = 0


def expert_sizes(f: Fields, size: int) -> ExpertSizes:
    """Return the sizes of experts; their number has two spellings.

    Args:
      size: width of each expert's MLP.

    Raises:
      ConfigError: the numbers do not fit each other.
    """
    names = ("num_experts", "num_local_experts")
    f.used.update(names)
    named = [name for name in names if f.get(name) is not None]
    name = (named or [name for name in names if name in f.values] or names[1:])[0]
    count = integer(f, name)
    chosen = integer(f, "num_experts_per_tok")
    if not 1 <= chosen <= count <= MOST_EXPERTS or size < 1:
        raise ConfigError(
            f"{f.where}: {chosen} of {count!r} experts of width {size} cannot be chosen; expected"
            " num_experts (or num_local_experts) to be at least num_experts_per_tok,"
            f" {MOST_EXPERTS} at most, and a positive width"
        )
    f.used.update(("output_router_logits", "router_aux_loss_coef"))  # training only
    return ExpertSizes(count, chosen, size)


def geometry(f: Fields, *, rotated: int | None = None) -> AttentionConfig:
    """Return the attention geometry of a config.

    Args:
      rotated: number of dimensions of a head that rotate; None is all.
    """
    hidden = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    head_dim = integer(f, "head_dim", hidden // max(heads, 1))
    return AttentionConfig(
        hidden_size=hidden,
        num_layers=layer_count(f),
        num_heads=heads,
        num_kv_heads=integer(f, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=f.integer("intermediate_size"),
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        attention_bias=f.flag("attention_bias", False),
        rope=rope_config(f, head_dim if rotated is None else rotated),
    )


def layer_count(f: Fields) -> int:
    """Return the number of layers, checked before lists of that length are made."""
    if not 1 <= (layers := f.integer("num_hidden_layers")) <= MOST_LAYERS:
        raise ConfigError(
            f"{f.where}: num_hidden_layers is {layers}; expected 1 to {MOST_LAYERS:,}"
        )
    return layers


def switched_window(f: Fields) -> int | None:
    """Return the sliding window, if there is one and it is switched on."""
    enabled = f.flag("use_sliding_window", not f.optional_window)
    window = integer(f, "sliding_window", NO_WINDOW)
    if not enabled or window == NO_WINDOW:
        return None
    if window < 1:
        raise ConfigError(f"{f.where}: sliding_window is {window}; expected a positive integer")
    return window


def layer_windows(f: Fields, num_layers: int) -> list[tuple[str, int | None]]:
    """Return kind and window of each layer."""
    window = switched_window(f)
    first = f.integer("max_window_layers", 28 if f.optional_window else num_layers)
    usual = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    return [(kind, window if kind == SLIDING else None) for kind in layer_types(f, usual)]


def layer_types(f: Fields, usual: list[str], other: str = SLIDING) -> list[str]:
    """Return the kind of each layer, full attention or another one.

    Args:
      usual: kinds of a config that lists none.

    Raises:
      ConfigError: it names other kinds, or another number of them.
    """
    kinds = f.get("layer_types", usual)
    known = isinstance(kinds, list) and all(kind in (FULL, other) for kind in kinds)
    if not known or len(kinds) != len(usual):
        raise ConfigError(
            f"{f.where}: layer_types is {kinds}; expected {len(usual)} entries of"
            f" {FULL!r} or {other!r}"
        )
    return kinds


def text_part(f: Fields, others: Iterable[str], read: Callable[[Fields, Fields], Any]) -> Any:
    """Return the text model of a config, which may be nested in a multimodal one.

    Args:
      others: fields of the other parts, and of the wrapper.
      read: returns the model, given the fields of the text part and the outer ones.

    Raises:
      ConfigError: a field is missing or not supported.
    """
    if f.values.get("text_config") is None:
        return read(f, f)
    f.used.update(("model_type", "dtype", *others))
    text = f.inner("text_config")
    config = read(text, f)
    text.check_rest()
    return config


def all_end_ids(*parts: Fields) -> tuple[int, ...]:
    """Return the end tokens that the parts of a config name, each once."""
    ids: list[int] = []
    for part in parts:
        ids += id_tuple(part.get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def first_id(value: Any, vocab_size: int) -> int | None:
    """Return the first id of the vocabulary among one or several, or None.

    Raises:
      ConfigError: the value is no id, nor a list of ids.
    """
    return next((i for i in id_tuple(value) if 0 <= i < vocab_size), None)


def dtype_name(f: Fields) -> str:
    """Return the dtype of the published weights, in either spelling."""
    name = f.get("dtype", f.get("torch_dtype", "float32"))
    f.used.update(("dtype", "torch_dtype"))
    return str(name).removeprefix("torch.")


def id_tuple(value: Any) -> tuple[int, ...]:
    """Return no id, one id or a list of ids as a tuple.

    Raises:
      ConfigError: the value is none of these.
    """
    if value is None:
        return ()
    ids = tuple(whole(i) for i in (value if isinstance(value, list) else [value]))
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"token ids are {value!r}; expected an integer or a list of integers")
    return ids
