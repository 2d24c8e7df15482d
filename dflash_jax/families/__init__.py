"""Target families and drafter kinds: one file each, which is imported when it is asked for.

A file of this folder with `FAMILY` is a target architecture, one with `DRAFTER` a kind of
drafter: configuration, tensors and forms (see `families.entry`). Its network, which needs JAX,
is in a file of its own, `<name>_net.py`. A new file needs a line in `BUILT_IN` or `BUILT_IN_KINDS`.

An installed package adds them by an entry point of the group `dflash_jax.targets` or
`dflash_jax.drafters`: its name is that of the family or kind, its value a module with `FAMILY` or
`DRAFTER`. `register` does so in a running process. Neither imports JAX.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.errors import ConfigError

if TYPE_CHECKING:
    from dflash_jax.converters.formats.slots import Folder, Slot
    from dflash_jax.families.entry import DrafterKind, Family

TARGETS = "dflash_jax.targets"  # entry point groups
DRAFTERS = "dflash_jax.drafters"
Declared = TypeVar("Declared")


class Claim(NamedTuple):
    """What files name if they hold a family: its `model_types`, and architectures in GGUF."""

    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()


class KindClaim(NamedTuple):
    """What files name if they hold a kind of drafter: `architectures` and `projector_type`."""

    architectures: tuple[str, ...]
    projector_types: tuple[str, ...] = ()


BUILT_IN = {
    "gemma3": Claim(("gemma3", "gemma3_text"), gguf=("gemma3",)),
    "gemma4": Claim(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), gguf=("gemma4",)
    ),
    "glm4": Claim(("glm4",), gguf=("glm4",)),
    "gpt_oss": Claim(("gpt_oss",), gguf=("gpt-oss",)),
    "granite": Claim(("granite",), gguf=("granite",)),
    "lfm2": Claim(("lfm2",), gguf=("lfm2",)),
    "llama": Claim(("llama",), gguf=("llama",)),
    "ministral3": Claim(("ministral3", "mistral3"), gguf=("mistral3",)),
    "mistral": Claim(("mistral", "ministral")),
    "olmo2": Claim(("olmo2",), gguf=("olmo2",)),
    "phi3": Claim(("phi3",), gguf=("phi3",)),
    "qwen2": Claim(("qwen2",), gguf=("qwen2",)),
    "qwen3": Claim(("qwen3",), gguf=("qwen3",)),
    "qwen3_5": Claim(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        gguf=("qwen35", "qwen35moe"),
    ),
    "qwen3_moe": Claim(("qwen3_moe",), gguf=("qwen3moe",)),
    "qwen3_next": Claim(("qwen3_next",), gguf=("qwen3next",)),
    "smollm3": Claim(("smollm3",), gguf=("smollm3",)),
}
BUILT_IN_KINDS = {
    "dflash": KindClaim(("DFlashDraftModel", "Qwen3DFlashDraftModel"), ("dflash",)),
    "dflash2": KindClaim(("DFlash2DraftModel",)),
    "domino": KindClaim(("DominoDraftModel",), ("domino",)),
    "dspark": KindClaim(("Qwen3DSparkModel", "DSparkDraftModel"), ("dspark",)),
}


class _Others(NamedTuple):
    """Families and kinds of other packages, by name."""

    families: dict[str, "Family"]
    kinds: dict[str, "DrafterKind"]


_REGISTERED = _Others({}, {})  # in this process


class _Entries(Mapping[str, Declared]):
    """What families or kinds declare, by name; ours are imported when they are asked for."""

    def __init__(self, built_in: Iterable[str], attribute: str, others: Mapping[str, Declared]):
        self._built_in = tuple(built_in)
        self._attribute = attribute
        self._others = others

    def __getitem__(self, name: str) -> Declared:
        if name not in self._built_in:
            return self._others[name]
        return getattr(importlib.import_module(f"{__name__}.{name}"), self._attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._others

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from self._others

    def __len__(self) -> int:
        return len(self._built_in) + len(self._others)


@functools.cache
def target_families() -> Mapping[str, "Family"]:
    """Return every target family, by name."""
    return _Entries(BUILT_IN, "FAMILY", _others().families)


@functools.cache
def drafter_kinds() -> Mapping[str, "DrafterKind"]:
    """Return every kind of drafter, by name."""
    return _Entries(BUILT_IN_KINDS, "DRAFTER", _others().kinds)


@functools.cache
def model_types() -> Mapping[str, str]:
    """Return the family of each known `model_type`."""
    claims = {name: claim.model_types for name, claim in BUILT_IN.items()}
    others = {name: family.model_types for name, family in _others().families.items()}
    return _index(claims | others)


@functools.cache
def gguf_architectures() -> Mapping[str, str]:
    """Return the family of each known `general.architecture` of a GGUF target."""
    claims = {name: claim.gguf for name, claim in BUILT_IN.items()}
    for name, family in _others().families.items():
        claims[name] = family.gguf.architectures if family.gguf else ()
    return _index(claims)


@functools.cache
def drafter_architectures() -> Mapping[str, str]:
    """Return the kind of each known entry of a drafter's `architectures`."""
    claims = {name: claim.architectures for name, claim in BUILT_IN_KINDS.items()}
    others = {name: kind.architectures for name, kind in _others().kinds.items()}
    return _index(claims | others)


@functools.cache
def projector_types() -> Mapping[str, str]:
    """Return the kind of each known `projector_type`."""
    claims = {name: claim.projector_types for name, claim in BUILT_IN_KINDS.items()}
    others = {name: kind.projector_types for name, kind in _others().kinds.items()}
    return _index(claims | others)


@functools.cache
def config_classes() -> Mapping[str, type[Any]]:
    """Return every class of configurations, by its name."""
    entries = (*target_families().values(), *drafter_kinds().values())
    return {entry.config.__name__: entry.config for entry in entries}


def family_of(model_type: str) -> str:
    """Return the name of a target's family.

    Raises:
      ConfigError: no family has this `model_type`.
    """
    if model_type not in model_types():
        raise ConfigError(
            f"model_type {model_type!r} is not a target this version runs;"
            f" it runs {', '.join(sorted(model_types()))}"
        )
    return model_types()[model_type]


def family(model_type: str) -> "Family":
    """Return the family of a target.

    Raises:
      ConfigError: as of `family_of`.
    """
    return target_families()[family_of(model_type)]


def slots(config: AttentionConfig) -> list["Slot"]:
    """Return the parameters of a target or of a drafter.

    Raises:
      ConfigError: nothing is registered for this configuration.
    """
    if isinstance(config, DrafterConfig) and config.kind in drafter_kinds():
        return drafter_kinds()[config.kind].slots(config)
    if isinstance(config, TargetConfig) and config.model_type in model_types():
        return family(config.model_type).slots(config)
    kind = config.model_type if isinstance(config, TargetConfig) else type(config).__name__
    raise ConfigError(
        f"no name table for {kind}; there is one for {', '.join(target_families())} and drafters"
    )


def folder(config: TargetConfig) -> "Folder":
    """Return what to expect of a Hugging Face folder that holds this target."""
    return family(config.model_type).folder(config)


def register(name: str, entry: "str | Family | DrafterKind") -> None:
    """Add a target family or a drafter kind of another package to this process.

    Args:
      name: name of the family, or of the kind, which is the `kind` of its configurations.
      entry: the family or kind, or the name of a module that has it as `FAMILY` or `DRAFTER`.

    Raises:
      ConfigError: the name is taken, or the module has neither.
    """
    if name in target_families() or name in drafter_kinds():
        raise ConfigError(f"there is a family or kind {name!r} already; choose another name")
    _add(_REGISTERED, name, _imported(name, entry) if isinstance(entry, str) else entry)
    _forget()
    try:
        model_types()
        gguf_architectures()
        drafter_architectures()
        projector_types()
    except ConfigError:
        _unregister(name)
        raise


def _unregister(*names: str) -> None:
    """Remove families and kinds that `register` added."""
    for name in names:
        _REGISTERED.families.pop(name, None)
        _REGISTERED.kinds.pop(name, None)
    _forget()


@functools.cache
def _others() -> _Others:
    """Return what was registered in this process, and what installed packages declare.

    Raises:
      ConfigError: a package cannot be imported, or has a name that is taken.
    """
    others = _Others({**_REGISTERED.families}, {**_REGISTERED.kinds})
    for group in (TARGETS, DRAFTERS):
        for point in importlib.metadata.entry_points(group=group):
            names = {*BUILT_IN, *BUILT_IN_KINDS, *others.families, *others.kinds}
            if point.name in names:
                raise ConfigError(f"two packages provide {point.name!r}; uninstall one of them")
            _add(others, point.name, _imported(point.name, point.value))
    return others


def _add(others: _Others, name: str, declared: Any) -> None:
    """Add what another package declares to the families or to the kinds."""
    from dflash_jax.families.entry import DrafterKind, Family

    if isinstance(declared, Family):
        others.families[name] = declared
    elif isinstance(declared, DrafterKind):
        others.kinds[name] = declared
    else:
        raise ConfigError(f"{name!r} is {declared!r}; expected a Family or a DrafterKind")


def _imported(name: str, module: str) -> Any:
    """Return the entry in a module of another package."""
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module}, which another package provides for {name!r}, cannot be imported"
            f" ({error}); repair or uninstall that package"
        ) from error
    for attribute in ("FAMILY", "DRAFTER"):
        if hasattr(imported, attribute):
            return getattr(imported, attribute)
    raise ConfigError(f"{module}, given for {name!r}, has neither FAMILY nor DRAFTER; define one")


def _forget() -> None:
    for cached in (
        _others,
        target_families,
        drafter_kinds,
        model_types,
        gguf_architectures,
        drafter_architectures,
        projector_types,
        config_classes,
    ):
        cached.cache_clear()


def _index(claims: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the name that claims each key.

    Raises:
      ConfigError: two claim the same.
    """
    owners: dict[str, str] = {}
    for name, keys in claims.items():
        for key in keys:
            if owners.setdefault(key, name) != name:
                raise ConfigError(
                    f"{owners[key]!r} and {name!r} both claim {key!r}; remove it from one of them"
                )
    return owners
