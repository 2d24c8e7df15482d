"""Rotary embedding settings of a config, in all spellings and kinds."""

import dataclasses
import math

from dflash_jax.config.fields import Fields, integer
from dflash_jax.errors import ConfigError

KINDS = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")  # keys of objects with one for each type
BY_LENGTH = ("dynamic", "longrope")  # frequencies depend on the length of the whole text
ORIGINAL = "original_max_position_embeddings"
# Keys of some kinds, which the others ignore.
KEYS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "short_factor",
    "truncate",
    ORIGINAL,
)
# Keys that do not change the embedding of text: its three position rows, if any, are equal.
UNREAD = ("finetuned", "mrope_interleaved", "mrope_section")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: its base, and the rescaling of its frequencies."""

    theta: float = 10000.0
    kind: str = "default"  # one of KINDS
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # multiplies cos and sin
    partial_rotary_factor: float = 1.0  # proportional: the share of pairs that rotate
    short_factors: tuple[float, ...] = ()  # longrope, one per pair: up to original_length
    long_factors: tuple[float, ...] = ()  # longrope: for longer texts
    length: int = 0  # dynamic, longrope: of a text longer than original_length

    def for_length(self, length: int) -> "RopeConfig":
        """Return the embedding of a text whose length in tokens is known."""
        longer = self.kind in BY_LENGTH and length > self.original_length
        return dataclasses.replace(self, length=length) if longer else self


PLAIN = RopeConfig()


def longest(rope: RopeConfig, length: int) -> int:
    """Return the number of positions, at most `length`, that a cache can hold.

    Beyond the original length, cached keys would have to be rotated by other frequencies, which
    a cache does not support, here or in transformers.
    """
    return min(length, rope.original_length) if rope.kind in BY_LENGTH else length


def made_for(f: Fields) -> int:
    """Return `max_position_embeddings` or the family's default; 0 if there is none."""
    return integer(f, "max_position_embeddings", 0)


def rope_config(f: Fields, width: int) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, which holds the base as well.

    The former take precedence, as in transformers. An object may hold one object for each type of
    layers, which must describe the same embedding.

    Args:
      width: number of dimensions of a head that rotate.

    Raises:
      ConfigError: the kind or a setting is not supported, or layers rotate differently.
    """
    old = f.inner("rope_scaling")
    new = f.inner("rope_parameters")
    outer = {name: f.get(name) for name in (ORIGINAL, "partial_rotary_factor")}
    outer_fields = {name: value for name, value in outer.items() if value is not None}
    base = f.number("rope_theta", 10000.0)
    ropes = {}
    for r in _by_layer_type(old if old.values else new, f):
        theta = r.number("rope_theta", base)
        ropes[r.where] = scaled(r.over(r.values | outer_fields), f, theta, width)
    if len({*ropes.values()}) > 1:
        raise ConfigError(
            f"{' and '.join(ropes)} differ; in models of type {f.values.get('model_type')!r} all"
            " layers rotate alike"
        )
    return next(iter(ropes.values()))


def rotated_share(f: Fields, usual: float) -> float:
    """Return the share of each head's dimensions that rotate, in any spelling.

    Args:
      usual: that of a config without the field.

    Raises:
      ConfigError: it is not from 0 to 1.
    """
    old = f.inner("rope_scaling")
    new = f.inner("rope_parameters")
    outer = f.number("partial_rotary_factor", usual)
    share = (old if old.values else new).number("partial_rotary_factor", outer)
    if not 0 < share <= 1:
        raise ConfigError(f"{f.where}: partial_rotary_factor is {share}; expected 0 to 1")
    return share


def _by_layer_type(r: Fields, f: Fields) -> list[Fields]:
    """Return the objects for the types of layers that a config has, or the one for all of them."""
    if not (types := [name for name in r.values if name in LAYER_TYPES]):
        return [r]
    r.used.update(types)
    r.refuse_rest()
    layers = f.values.get("layer_types")
    present = [name for name in types if not isinstance(layers, list) or name in layers]
    return [r.inner(name) for name in present or types]


def scaled(r: Fields, f: Fields, theta: float, width: int) -> RopeConfig:
    """Return the rotary embedding of one object of a config.

    Args:
      r: the object.
      f: the config that holds it, for the maximal length of texts.
      theta: the base.
      width: number of dimensions of a head that rotate.

    Raises:
      ConfigError: the kind or a setting is not supported.
    """
    kind = r.get("rope_type", r.get("type", "default"))
    if kind not in KINDS:
        raise ConfigError(f"{f.where}: rope type {kind!r} is not supported; {', '.join(KINDS)} are")
    r.used.update(("rope_type", "type", "rope_theta", *KEYS, *UNREAD))
    r.refuse_rest()
    factor = r.number("factor", 1.0)
    if not (theta > 0 and factor > 0):
        raise ConfigError(
            f"{f.where}: rope base is {theta} and its factor {factor}; both must be above 0"
        )
    measured = kind in ("llama3", "yarn", *BY_LENGTH)
    length = made_for(f) if measured else f.integer("max_position_embeddings", 0)
    original = r.integer(ORIGINAL, 0) or length
    rope = RopeConfig(theta=theta, kind=kind, original_length=original, factor=factor)
    if kind == "default":  # transformers ignores shares and factors here
        return rope
    share = r.number("partial_rotary_factor", 1.0)
    if kind == "proportional":
        if not 0 <= share <= 1:
            raise ConfigError(f"{r.where}: partial_rotary_factor is {share}; expected 0 to 1")
        return dataclasses.replace(rope, partial_rotary_factor=share)
    if not 0 <= share < 2 or int(width * share) != width:
        raise ConfigError(
            f"{r.where}: partial_rotary_factor is {share}; with {kind} scaling only 1.0 is"
            " supported (transformers fails on any other)"
        )
    named = r.get("factor") is not None
    if not named and original > 0 and length > 0:
        rope = dataclasses.replace(rope, factor=length / original)
    if kind == "llama3":
        low = r.number("low_freq_factor", 1.0)
        high = r.number("high_freq_factor", 4.0)
        rope = dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
    elif kind == "yarn":
        rope = _yarn(r, rope)
    elif kind == "longrope":
        rope = _longrope(r, rope, width)
    elif kind == "dynamic":
        rope = dataclasses.replace(rope, original_length=length)
    _check(rope, r, f, width)
    if not named and kind != "longrope" and (kind != "yarn" or "factor" not in r.values):
        raise ConfigError(
            f"{r.where} lacks the 'factor' of {kind} scaling; add the one it was published with"
        )
    return rope


def _yarn(r: Fields, rope: RopeConfig) -> RopeConfig:
    """Add the fields of yarn; a beta of 0 is none, and scales count only as a pair."""

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(max(rope.factor, 1.0)) + 1.0

    one = r.number("mscale", 0.0)
    other = r.number("mscale_all_dim", 0.0)
    usual = growth(1.0)
    if one and other and growth(other):
        usual = growth(one) / growth(other)
    return dataclasses.replace(
        rope,
        beta_fast=r.number("beta_fast", 32.0) or 32.0,
        beta_slow=r.number("beta_slow", 1.0) or 1.0,
        truncate=r.flag("truncate", "truncate" not in r.values),  # null is false
        attention_factor=r.number("attention_factor", usual),
    )


def _longrope(r: Fields, rope: RopeConfig, width: int) -> RopeConfig:
    """Add the fields of longrope: two lists with a divisor per pair."""
    usual = 1.0
    if rope.factor > 1 and rope.original_length > 1:
        usual = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    return dataclasses.replace(
        rope,
        short_factors=_divisors(r, "short_factor", width // 2),
        long_factors=_divisors(r, "long_factor", width // 2),
        attention_factor=r.number("attention_factor", usual),
    )


def _divisors(r: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return a list of divisors, one per pair."""
    listed = r.get(name)
    numbers = isinstance(listed, list) and all(type(x) in (int, float) for x in listed)
    if not numbers or len(listed) != count or not all(0 < x < 1e30 for x in listed):
        raise ConfigError(f"{r.where}: {name} is {listed!r}; expected {count} positive numbers")
    return tuple(map(float, listed))


def _check(rope: RopeConfig, r: Fields, f: Fields, width: int) -> None:
    """Check that the formula of a rescaling is defined."""
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    sound = {
        "llama3": rope.original_length > 0 and high > low,
        "yarn": rope.original_length > 0
        and rope.theta > 1
        and min(rope.beta_fast, rope.beta_slow) > 0,
        "longrope": rope.original_length > 1,
        "dynamic": rope.original_length > 0 and rope.factor >= 1 and width > 2,
    }
    if not sound.get(rope.kind, True):
        raise ConfigError(
            f"{f.where}: {rope.kind} rotary scaling of the base {rope.theta} by {r.values} is"
            f" impossible; {ORIGINAL} (or max_position_embeddings) must be above 0, for llama3"
            " high_freq_factor above low_freq_factor, for yarn the base above 1 and the betas"
            " above 0, for dynamic the factor 1 or more and heads wider than 2"
        )
