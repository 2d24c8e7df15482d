"""Named recipes, and parsing of settings that change one."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.errors import ConfigError
from dflash_jax.plan import Weights
from dflash_jax.train.recipe import ADAMW, CACHE, DFLASH2, DPACE, Bucket, Recipe, Schedule

SMOKE = Recipe(
    name="smoke",
    layers=1,
    inner=64,
    block=4,
    rank=8,
    candidates=4,
    tap_count=2,
    decay=2.0,
    schedule=Schedule(steps=6, rate=2e-3, save_every=3),
    anchors=4,
    buckets=(Bucket(length=256, rows=4),),
    prompts=12,
    text_prompts=4,
    new_tokens=16,
    text_tokens=16,
    answer_buckets=(Bucket(length=256, rows=4),),
    held_out=6,
    held_out_tokens=32,
)

TINY_CPU = Recipe(
    name="tiny-cpu",
    layers=3,
    inner=512,
    taps=(1, 2, 4),
    block=8,
    initial="fresh",
    rank=64,
    candidates=8,
    decay=4.0,
    schedule=Schedule(steps=1600, rate=2e-3),
    anchors=2,
    buckets=(
        Bucket(length=64, rows=120),
        Bucket(length=160, rows=48),
        Bucket(length=448, rows=18),
    ),
    features=CACHE,
    dtype="bfloat16",
    prompts=4_500,
    text_prompts=1_300,
    given=7_000,
    new_tokens=128,
    answer_buckets=(
        Bucket(length=160, rows=64),
        Bucket(length=256, rows=48),
        Bucket(length=448, rows=24),
    ),
    held_out=260,
)

TINY_PAIR = dataclasses.replace(
    TINY_CPU,
    name="tiny-pair",
    schedule=Schedule(steps=5000, rate=2e-3),
    anchors=12,
    buckets=(
        Bucket(length=160, rows=16),
        Bucket(length=448, rows=6),
        Bucket(length=1280, rows=1),
    ),
    dtype="float32",
    prompts=27_000,
    text_prompts=2_400,
    given=0,
)

TINY_DFLASH2 = dataclasses.replace(TINY_PAIR, name="tiny-dflash2", kind=DFLASH2)

TINY_H200 = dataclasses.replace(
    TINY_CPU,
    name="tiny-h200",
    layers=4,
    inner=1408,
    taps=(1, 3, 5, 6),
    schedule=Schedule(steps=2500, rate=1e-3),
    anchors=32,
    buckets=(
        Bucket(length=256, rows=128),
        Bucket(length=512, rows=64),
        Bucket(length=1280, rows=24),
    ),
    dtype="float32",
    prompts=40_000,
    text_prompts=8_000,
    given=0,
    new_tokens=160,
    text_tokens=96,
    answer_buckets=(
        Bucket(length=256, rows=1024),
        Bucket(length=512, rows=512),
        Bucket(length=1280, rows=192),
    ),
)

SMOLLM2 = Recipe(
    name="smollm2",
    layers=2,
    taps=(1, 8, 14, 21, 27),
    block=6,
    decay=4.0,
    draft_vocab=8192,
    schedule=Schedule(steps=2400, rate=1e-3),
    anchors=16,
    buckets=(Bucket(length=192, rows=16), Bucket(length=272, rows=12)),
    features=CACHE,
    target_weights="int8",
    prompts=9_000,
    new_tokens=128,
    turn_tokens=96,
    answer_buckets=(Bucket(length=192, rows=64), Bucket(length=272, rows=64)),
    held_out=60,
)

QWEN3_8B = Recipe(
    name="qwen3-8b",
    layers=5,
    block=16,
    weights=DPACE,
    optimizer=ADAMW,
    weight_decay=0.0,
    schedule=Schedule(steps=20_000, rate=6e-4, save_every=500),
    anchors=128,
    buckets=(
        Bucket(length=1024, rows=8),
        Bucket(length=2048, rows=4),
        Bucket(length=4096, rows=2),
    ),
    dtype="bfloat16",
    prompts=100_000,
    text_prompts=20_000,
    new_tokens=2048,
    text_tokens=512,
    text_prompt=512,
    answer_buckets=(
        Bucket(length=1024, rows=128),
        Bucket(length=4096, rows=32),
    ),
)

RECIPES = {
    recipe.name: recipe
    for recipe in (SMOKE, TINY_CPU, TINY_PAIR, TINY_DFLASH2, TINY_H200, SMOLLM2, QWEN3_8B)
}


def recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """Return a named recipe, changed by settings like "steps=900" or "buckets=160x16,448x6".

    Raises:
      ConfigError: the name or a setting is unknown, or a value cannot be parsed.
    """
    if name not in RECIPES:
        raise ConfigError(f"preset {name!r} is not known; choose one of {', '.join(RECIPES)}")
    base = RECIPES[name]
    types = typing.get_type_hints(Recipe) | typing.get_type_hints(Schedule)
    inner = {f.name for f in dataclasses.fields(Schedule)}
    changed: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in types or key in ("schedule", "name") or not text:
            known = sorted(set(types) - {"schedule", "name"})
            raise ConfigError(
                f"setting {setting!r} is not known; expected NAME=VALUE with one of"
                f" {', '.join(known)}"
            )
        changed[key] = _read(key, text, types[key])
    own = {key: changed.pop(key) for key in inner & changed.keys()}
    changed["schedule"] = dataclasses.replace(base.schedule, **own)
    return dataclasses.replace(base, **changed)


def _read(key: str, text: str, kind: Any) -> Any:
    readers: dict[Any, Callable[[str], Any]] = {
        tuple[int, ...]: lambda t: tuple(int(part) for part in t.split(",")),
        tuple[str, ...]: lambda t: tuple(part.strip().lower() for part in t.split(",")),
        tuple[Bucket, ...]: lambda t: tuple(map(_bucket, t.split(","))),
        bool: _flag,
        Weights: str,
    }
    try:
        return readers.get(kind, kind)(text)
    except ValueError as error:
        raise ConfigError(
            f"{key}={text} cannot be read ({error}); numbers look like 900 or 1e-3, lists like"
            " 1,9,17, buckets like 160x16,448x6 (length x rows), choices like true or false"
        ) from error


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _bucket(text: str) -> Bucket:
    length, rows = text.split("x")
    return Bucket(length=int(length), rows=int(rows))
