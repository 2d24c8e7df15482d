"""Which type each tensor of a GGUF file has.

The mixtures are those of llama.cpp's quantiser (`llama-quant.cpp`): most matrices have one type,
and those that matter most have more bits. Of models with eight experts it makes exceptions, which
are left out; embeddings beside a head have more bits here in files of four bits.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dflash_jax.config import AttentionConfig, TargetConfig
from dflash_jax.converters.formats.quants.types import BY_NAME, GgmlType
from dflash_jax.converters.forms import DTYPES, GGUF_TYPES, TENSOR_TYPES
from dflash_jax.errors import ConfigError

# Matrices that llama.cpp expects in float32.
FLOAT32 = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
# Matrices that llama-quantize leaves as they are; its converter writes them as Q8_0, too.
BARELY_QUANTISED = ("per_layer_model_proj",)
HEAD = "output.weight"
EMBEDDING = "token_embd.weight"
EMBEDDINGS = (EMBEDDING, "per_layer_token_embd.weight")
# Types for rows that 256 does not divide; F16 where 32 does not divide them either.
NARROWER = {
    "Q6_K": "Q8_0",
    "Q5_K": "Q5_1",
    "Q4_K": "Q5_0",
    **dict.fromkeys(("Q3_K", "Q2_K", "IQ4_XS"), "IQ4_NL"),
}


class LayerPlace(NamedTuple):
    """Where a tensor is among those of its kind, and what its type depends on besides.

    Attributes:
      number: number of the tensor's layer among `count`; layers without attention are not counted
        for values.
      shared: query heads for each key and value head.
      steered: whether an importance matrix steers errors.
    """

    number: int
    count: int
    shared: int
    steered: bool


class TypeRule(NamedTuple):
    """Tensors with `part` in their name that have another type where `holds`."""

    part: str
    kind: str
    holds: Callable[[LayerPlace], bool] = lambda place: True


def _first(share: int) -> Callable[[LayerPlace], bool]:
    """Return the condition of layers in the first of `share` equal parts."""
    return lambda place: place.number < place.count // share


def _spread(place: LayerPlace) -> bool:
    """Return whether a layer is in the first or last eighth, or every third one between."""
    eighth = place.count // 8
    outer = place.number < eighth or place.number >= 7 * place.count // 8
    return outer or (place.number - eighth) % 3 == 2


def _few_values(place: LayerPlace) -> bool:
    """Return whether values are small matrices: four or more query heads share a head of theirs."""
    return place.shared >= 4


VALUES = "attn_v.weight"
DOWN = "ffn_down"
OUT = "attn_output.weight"
FUSED = "attn_qkv.weight"


@dataclass(frozen=True)
class Mixture:
    """Types of a file's matrices.

    Attributes:
      base: type of the matrices that no rule names.
      head: type of the head, and of an embedding that is the head.
      embedding: type of an embedding beside a head; None for `base`.
      rules: the first one that fits a tensor gives its type.
    """

    base: str
    head: str = "Q6_K"
    embedding: str | None = None
    rules: tuple[TypeRule, ...] = ()


def _spread_to_six(base: str, fused: str) -> Mixture:
    rules = (
        TypeRule(VALUES, "Q6_K", _spread),
        TypeRule(DOWN, "Q6_K", _spread),
        TypeRule(FUSED, fused),
    )
    return Mixture(base, "Q6_K", "Q6_K" if base == "Q4_K" else None, rules)


def _by_table(base: str) -> Mixture:
    early = TypeRule(DOWN, "Q5_K", lambda place: not place.steered and _first(8)(place))
    return Mixture(base, "Q6_K", "Q6_K", (TypeRule(VALUES, "Q5_K", _few_values), early))


def _plain_four(base: str, steered: str) -> Mixture:
    early = TypeRule(DOWN, steered, lambda place: place.steered and _first(8)(place))
    return Mixture(base, "Q6_K", "Q6_K", (early,) if steered != base else ())


MIXTURES: Mapping[str, Mixture] = {
    **{name: Mixture(name.upper(), name.upper()) for name in ("f32", "f16", "bf16", "q8_0")},
    "q4_0": _plain_four("Q4_0", "Q4_1"),
    "q4_1": _plain_four("Q4_1", "Q4_1"),
    "q5_0": Mixture("Q5_0", rules=_plain_four("Q5_0", "Q5_1").rules),
    "q5_1": Mixture("Q5_1"),
    "q6_k": Mixture("Q6_K"),
    "q5_k_m": _spread_to_six("Q5_K", "Q6_K"),
    "q5_k_s": Mixture("Q5_K"),
    "q4_k_m": _spread_to_six("Q4_K", "Q5_K"),
    "q4_k_s": Mixture(
        "Q4_K",
        embedding="Q6_K",
        rules=(
            TypeRule(VALUES, "Q5_K", lambda place: place.number < 4),
            TypeRule(DOWN, "Q5_K", _first(8)),
        ),
    ),
    "q3_k_l": Mixture(
        "Q3_K",
        rules=(*(TypeRule(part, "Q5_K") for part in (VALUES, DOWN, OUT)), TypeRule(FUSED, "Q4_K")),
    ),
    "q3_k_m": Mixture(
        "Q3_K",
        rules=(
            TypeRule(VALUES, "Q5_K", lambda place: place.number < 2),
            TypeRule(DOWN, "Q5_K", _first(16)),
            *(TypeRule(part, "Q4_K") for part in (VALUES, DOWN, OUT, FUSED)),
        ),
    ),
    "q3_k_s": Mixture("Q3_K"),
    "q2_k": Mixture(
        "Q2_K",
        rules=(
            TypeRule(VALUES, "Q4_K", _few_values),
            *(TypeRule(part, "Q3_K") for part in (VALUES, DOWN, OUT)),
        ),
    ),
    "iq4_nl": _by_table("IQ4_NL"),
    "iq4_xs": _by_table("IQ4_XS"),
    "mxfp4": Mixture("MXFP4", "Q8_0", "Q8_0"),
}


@dataclass(frozen=True)
class Choice:
    """What is chosen for the types of a file.

    Attributes:
      mixture: name of a mixture, or of a dtype.
      head, embedding: their types in place of the mixture's, as `TENSOR_TYPES` spells them.
      steered: whether an importance matrix steers errors.
    """

    mixture: str
    head: str | None = None
    embedding: str | None = None
    steered: bool = False

    @property
    def name(self) -> str:
        """Name of the mixture.

        Raises:
          ConfigError: a name is unknown.
        """
        self.check()
        asked = self.mixture.lower()  # llama.cpp's names are in capitals
        return DTYPES.get(asked, asked)

    def check(self) -> None:
        """Check the names.

        Raises:
          ConfigError: a name is unknown.
        """
        for option, kind in (("output", self.head), ("embedding", self.embedding)):
            if kind is not None and kind.lower() not in TENSOR_TYPES:
                raise ConfigError(
                    f"the {option} type {kind!r} is not one of {', '.join(TENSOR_TYPES)}"
                )
        asked = self.mixture.lower()
        if DTYPES.get(asked, asked) not in MIXTURES:
            raise ConfigError(
                f"the GGUF type {self.mixture!r} is not one of {', '.join(GGUF_TYPES)}"
            )

    @property
    def quantised(self) -> bool:
        """Whether most matrices have a type of blocks."""
        return BY_NAME[MIXTURES[self.name].base].dtype is None


class Chosen(NamedTuple):
    """The type of a tensor, and the one it would have if its rows were of another length."""

    kind: GgmlType
    wanted: GgmlType


def choose(
    shapes: Mapping[str, tuple[int, ...]], config: AttentionConfig, choice: Choice
) -> dict[str, Chosen]:
    """Return the type of each tensor of a file, by its name.

    Args:
      shapes: shapes of the tensors, by name.
    """
    mixture = MIXTURES[choice.name]
    shared = config.num_heads // config.num_kv_heads
    values = [name for name in shapes if VALUES in name]
    experts = isinstance(config, TargetConfig) and config.num_experts > 0

    def place(name: str, part: str) -> LayerPlace:
        if part == VALUES:
            return LayerPlace(values.index(name), len(values), shared, choice.steered)
        layer = re.match(r"blk\.(\d+)\.", name)
        return LayerPlace(int(layer[1]) if layer else 0, config.num_layers, shared, choice.steered)

    def wanted(name: str) -> str:
        if name == HEAD or (name == EMBEDDING and HEAD not in shapes):
            return (choice.head or "").upper() or mixture.head
        if name in EMBEDDINGS:
            own = mixture.embedding if name == EMBEDDING else None
            return (choice.embedding or "").upper() or own or mixture.base
        if any(part in name for part in BARELY_QUANTISED) and choice.quantised:
            return mixture.base if mixture.base == "Q8_0" else "F16"
        if mixture.base == "MXFP4" and experts and "_exps" not in name:
            return "Q8_0"
        for rule in mixture.rules:
            if rule.part in name and rule.holds(place(name, rule.part)):
                return rule.kind
        return mixture.base

    return {
        name: _fitting(shape[-1], wanted(name)) if _is_matrix(name, shape) else _plain(name)
        for name, shape in shapes.items()
    }


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the type of matrices; vectors, norms and routers do not."""
    if len(shape) == 1 or name.endswith("_norm.weight") or not name.endswith(".weight"):
        return False
    return name != "d2t" and not any(part in name for part in FLOAT32)


def _plain(name: str) -> Chosen:
    kind = BY_NAME["I64" if name == "d2t" else "F32"]
    return Chosen(kind, kind)


def _fitting(width: int, wanted: str) -> Chosen:
    """Return the wanted type, or the next one whose blocks divide rows of `width`."""
    kind = BY_NAME[wanted]
    if width % kind.block_size:
        kind = BY_NAME[NARROWER.get(wanted, "F16")]
    if width % kind.block_size:
        kind = BY_NAME["F16"]
    return Chosen(kind, BY_NAME[wanted])


def fallbacks(
    chosen: Mapping[str, Chosen], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return tensors whose rows the blocks of the wanted type do not divide, with the reason."""
    return {
        name: f"{kind.name}: rows of {shapes[name][-1]} weights are not divided by the"
        f" {wanted.block_size} of a {wanted.name} block"
        for name, (kind, wanted) in chosen.items()
        if kind is not wanted
    }


def by_reason(fallbacks: Mapping[str, str]) -> Iterable[str]:
    """Yield a line for each reason: a tensor, and how many more it is true of."""
    names: dict[str, list[str]] = {}
    for name, why in fallbacks.items():
        names.setdefault(why, []).append(name)
    for why, tensors in names.items():
        if len(tensors) == 1:
            yield f"{tensors[0]} is {why}"
        else:
            yield f"{tensors[0]} and {len(tensors) - 1} more are {why}"
