"""Target families and drafter kinds, each registered once and found by name.

A file of this folder that defines `FAMILY` adds a target architecture, one that defines
`DRAFTER` a kind of drafter. Two other files of the same name complete it: its module in
`dflash_jax/models`, its tensor names and GGUF form in `converters/families`.

An installed package adds them by an entry point of the group `dflash_jax.targets` or
`dflash_jax.drafters`: its name is that of the family or kind, its value a package with the same
three files, `config.py`, `model.py` and `converter.py`. `register` does so in a running process.
Neither imports JAX.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dflash_jax.errors import ConfigError

TARGETS, DRAFTERS = "dflash_jax.targets", "dflash_jax.drafters"  # entry point groups
CONFIG, MODEL, CONVERTER = "config", "model", "converter"  # files of a family or kind
_FOLDERS = {
    CONFIG: "dflash_jax.config",
    MODEL: "dflash_jax.models",
    CONVERTER: "dflash_jax.converters.families",
}
_OTHERS: dict[str, str | Mapping[str, Any]] = {}  # packages that were registered in this process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A target architecture.

    Attributes:
      config: the class of its configurations, a `TargetConfig`.
      from_hf: makes a configuration from the `Fields` of a config.json.
      model_types: its `model_type` values, of text models and of files that wrap one.
      gguf: its `general.architecture` values in GGUF files.
      defaults: by `model_type`, what transformers takes for absent fields. Sizes that decide
        the shape of most weights have none: files must have them.
      optional_window: whether `sliding_window` counts only with `use_sliding_window`.
      any_width: whether native kernels give a token the same bits in calls of any width, which
        `tests/kernels/test_widths.py` shows. It does without experts only.
      module: the family whose module runs its configurations, too; its own by default.
    """

    config: type[Any]
    from_hf: Callable[[Any], Any]
    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    defaults: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    optional_window: bool = False
    any_width: bool = False
    module: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
      config: the class of its configurations, a `DrafterConfig` whose `kind` is the file's name.
      from_hf: makes a configuration from the `DrafterFields` of a config.json.
      architectures: its `architectures` values; exports write the first.
      projector_types: its `projector_type` values, which SpecForge and ModelOpt write.
      own_tables: whether it may have its own embedding and head over the whole vocabulary.
      recipe_fields: makes the kind's own fields of a configuration from a training recipe.
      second_loss: whether its training objective has a loss of a second head.
      wants_distribution: whether its objective needs the target's distributions, by the recipe.
      reads_embeddings: whether its objective needs the embeddings of tokens before drafted places.
    """

    config: type[Any]
    from_hf: Callable[[Any], Any]
    architectures: tuple[str, ...]
    projector_types: tuple[str, ...] = ()
    own_tables: bool = False
    recipe_fields: Callable[[Any], Mapping[str, Any]] = lambda recipe: {}
    second_loss: bool = False
    wants_distribution: Callable[[Any], bool] = lambda recipe: False
    reads_embeddings: bool = False


@functools.cache
def target_families() -> Mapping[str, Family]:
    """Return every registered target family, by file name."""
    return _registered("FAMILY", TARGETS)


@functools.cache
def drafter_kinds() -> Mapping[str, DrafterKind]:
    """Return every registered kind of drafter, by file name."""
    return _registered("DRAFTER", DRAFTERS)


@functools.cache
def model_types() -> Mapping[str, str]:
    """Return the family of each known `model_type`."""
    return _index((name, family.model_types) for name, family in target_families().items())


@functools.cache
def gguf_architectures() -> Mapping[str, str]:
    """Return the family of each known `general.architecture` of a GGUF target."""
    return _index((name, family.gguf) for name, family in target_families().items())


@functools.cache
def drafter_architectures() -> Mapping[str, str]:
    """Return the kind of each known entry of a drafter's `architectures`."""
    return _index((name, kind.architectures) for name, kind in drafter_kinds().items())


@functools.cache
def projector_types() -> Mapping[str, str]:
    """Return the kind of each known `projector_type`."""
    return _index((name, kind.projector_types) for name, kind in drafter_kinds().items())


@functools.cache
def config_classes() -> Mapping[str, type[Any]]:
    """Return every class of configurations, by its name."""
    entries = (*target_families().values(), *drafter_kinds().values())
    return {entry.config.__name__: entry.config for entry in entries}


def family_of(model_type: str) -> str:
    """Return the file name of a target's family.

    Raises:
      ConfigError: no family has this `model_type`.
    """
    if model_type not in model_types():
        raise ConfigError(
            f"model_type {model_type!r} is not a target this version runs;"
            f" it runs {', '.join(sorted(model_types()))}"
        )
    return model_types()[model_type]


def register(name: str, package: str | Mapping[str, Any]) -> None:
    """Add a target family or a drafter kind of another package to this process.

    Args:
      name: of the family, or of the kind, which is the `kind` of its configurations.
      package: the name of a package with `config.py`, which has `FAMILY` or `DRAFTER`, `model.py`
        with `build(config)`, and `converter.py`; or a mapping from these three words to objects
        with the same attributes. Without a converter, no files are read or written.

    Raises:
      ConfigError: the name is taken, or the package has neither `FAMILY` nor `DRAFTER`.
    """
    taken = name in _OTHERS or name in target_families() or name in drafter_kinds()
    if taken:
        raise ConfigError(f"there is a family or kind {name!r} already; choose another name")
    _OTHERS[name] = package
    try:
        config = part(name, CONFIG)
        if not (hasattr(config, "FAMILY") or hasattr(config, "DRAFTER")):
            raise ConfigError(f"the config of {name!r} has neither FAMILY nor DRAFTER; define one")
        _forget()
        model_types(), gguf_architectures(), drafter_architectures(), projector_types()
    except BaseException:
        del _OTHERS[name]
        _forget()
        raise


def part(name: str, kind: str) -> Any:
    """Return one of the three files of a family or kind, as a module.

    Args:
      kind: `CONFIG`, `MODEL` or `CONVERTER`.

    Raises:
      ConfigError: it belongs to another package, which lacks it or cannot be imported.
    """
    package = _OTHERS.get(name) or _installed(TARGETS).get(name) or _installed(DRAFTERS).get(name)
    if package is None:
        return importlib.import_module(f"{_FOLDERS[kind]}.{name}")
    if not isinstance(package, str):
        if kind not in package:
            raise ConfigError(f"{name!r} was registered without its {kind}; give one to `register`")
        return package[kind]
    try:
        return importlib.import_module(f"{package}.{kind}")
    except ImportError as error:
        raise ConfigError(
            f"{package}.{kind}, which another package provides for {name!r}, cannot be imported"
            f" ({error}); repair or uninstall that package"
        ) from error


def _registered(attribute: str, group: str) -> dict[str, Any]:
    """Return every entry, by name: of the files in this folder, and of other packages."""
    package = importlib.import_module(_FOLDERS[CONFIG])
    found = {}
    for file in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        if (entry := getattr(module, attribute, None)) is not None:
            found[file.name] = entry
    for name in [*_installed(group), *_OTHERS]:
        if (entry := getattr(part(name, CONFIG), attribute, None)) is None:
            continue
        if name in found:
            raise ConfigError(f"two packages provide {name!r}; uninstall one of them")
        found[name] = entry
    return found


@functools.cache
def _installed(group: str) -> Mapping[str, str]:
    """Return the packages of an entry point group, by name."""
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=group)}


def _forget() -> None:
    for cached in (
        target_families,
        drafter_kinds,
        model_types,
        gguf_architectures,
        drafter_architectures,
        projector_types,
        config_classes,
    ):
        cached.cache_clear()


def _index(claims: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Return the file that claims each key."""
    found: dict[str, str] = {}
    for name, keys in claims:
        for key in keys:
            if found.setdefault(key, name) != name:
                raise ConfigError(
                    f"{found[key]!r} and {name!r} both claim {key!r}; remove it from one of them"
                )
    return found
