"""From a name to models in memory: a directory, a file, a hub id, "tiny" for the shipped pair.

With the command line the only place that imports `converters`, and only inside functions.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from dflash_jax.checkpoint import is_checkpoint
from dflash_jax.compiler import Plan
from dflash_jax.compiler.cache import CompilationCache, use_compilation_cache
from dflash_jax.compiler.plan import Dtype
from dflash_jax.compiler.programs import model_axes, weight_specs
from dflash_jax.compiler.resolve import resolve_here, wide_block
from dflash_jax.compiler.settings import undisturbed
from dflash_jax.compiler.sharding import device_mesh, param_shardings
from dflash_jax.config import (
    DrafterConfig,
    TargetConfig,
    check_pair,
    drafter_config,
    read_json,
    read_target_config,
)
from dflash_jax.device import default_device
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import (
    CheckpointError,
    ConfigError,
    PlanError,
    TokenizerError,
    install_hint,
)
from dflash_jax.quant.layouts import Spec
from dflash_jax.quant.products import put_in_order, with_kernel
from dflash_jax.target_model import TargetModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.allocator import fewer_collections, tune_allocator
from dflash_jax.utils.forking import check_not_forked
from dflash_jax.utils.progress import announced, is_shown
from dflash_jax.utils.sources import SHIPPED, Source, find_local

Config = TargetConfig | DrafterConfig
AnyConfig = TypeVar("AnyConfig", TargetConfig, DrafterConfig)
AUTO = "auto"


def load(
    target: Source = SHIPPED,
    drafter: Source | None = AUTO,
    *,
    plan: Plan | None = None,
    taps: str = AUTO,
    tokenizer: Source | None = None,
    compilation_cache: CompilationCache = None,
    progress: bool | None = None,
) -> Engine:
    """A ready engine.

    Its programs are compiled when a request first needs them, or all at once by `warm_up`, and
    kept on disk: the next process with the same models and plan starts in a fraction of the time.

    Args:
      target: a Hugging Face directory, a checkpoint of ours, a .gguf file, a hub id, or "tiny"
        for the shipped pair.
      drafter: likewise; "auto" is the shipped drafter for "tiny" and none otherwise, None
        decodes without one.
      plan: what to decide differently from the defaults.
      taps: how a drafter file numbers the target layers it reads, "raw" or "plus1", where the
        file leaves doubt.
      tokenizer: a folder with tokenizer.json, in place of the target's own. Where a file's
        tokenizer cannot be rebuilt a warning says so, and only token ids can be given.
      compilation_cache: the folder of compiled programs; False keeps none. By default what the
        environment variable `DFLASH_COMPILATION_CACHE` says ("off" or a folder), else
        `~/.cache/dflash_jax/xla`, shared with the command line. A folder that JAX was already
        given stays.
      progress: whether to announce on standard error what takes longer than two seconds; by
        default on a terminal and in notebooks, unless `DFLASH_PROGRESS` is "off" or "on".

    Raises:
      ConfigError, CheckpointError: a model that cannot be run, or a pair that does not fit.
      PlanError: a plan that does not fit the models or the memory.
      ForkedProcessError: JAX runs in the process from which this one was forked.
    """
    check_not_forked()
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r}; expected None, or a dj.Plan(...)")
    use_compilation_cache(compilation_cache)
    pair = open_pair(target, drafter, taps=taps, taps_at=plan.taps_at, tokenizer=tokenizer)
    if note := wide_block(plan.block, pair.configs[1]):
        warnings.warn(note, stacklevel=2)
    return pair.engine(plan, progress=is_shown(progress))


class OpenModel(Protocol):
    """A model on disk, as `dflash_jax.converters.models.open_model` gives it."""

    @property
    def path(self) -> Path:
        """The folder or file that was opened."""
        ...

    @property
    def config(self) -> Config:
        """What it is."""
        ...

    def load(self, dtype: str, *, specs: Mapping[str, Spec] | None = None) -> dict[str, Any]:
        """Its parameters as NumPy arrays; some of them packed, by path."""
        ...

    def stored(self) -> dict[str, Spec]:
        """How its matrices are packed on disk, by path."""
        ...

    def companions(self) -> dict[str, str | Path]:
        """Its tokenizer's files by name, each a path or its text."""
        ...


@dataclasses.dataclass(frozen=True)
class OpenPair:
    """Models that were opened and checked, their weights still on disk. Made by `open_pair`."""

    target: OpenModel
    drafter: OpenModel | None
    tokenizer: Tokenizer | None

    @property
    def configs(self) -> tuple[TargetConfig, DrafterConfig | None]:
        """What the two models are."""
        drafter = _as(DrafterConfig, self.drafter.config) if self.drafter else None
        return _as(TargetConfig, self.target.config), drafter

    @undisturbed()
    @fewer_collections()
    def engine(self, plan: Plan | None = None, *, progress: bool = False) -> Engine:
        """Complete the plan, read the weights, and return a ready engine.

        Args:
          progress: announce on standard error what takes longer than two seconds, here and later.
        """
        with announced(f"dflash_jax: loading {self.target.path}", shown=progress):
            return self._engine(plan or Plan(), progress=progress)

    def _engine(self, plan: Plan, *, progress: bool) -> Engine:
        target, drafter = self.configs
        plan = resolve_here(self.with_stored(plan), target, drafter)
        specs = weight_specs(plan, target, drafter)
        params = {}
        for role, model in self._models.items():
            start = role + "/"
            own = {
                path.removeprefix(start): how
                for path, how in specs.items()
                if path.startswith(start)
            }
            params[role] = model.load(plan.dtype, specs=own)
        put_in_order(params, plan.order)
        params = with_kernel(params, plan.kernels != "xla")
        mesh = device_mesh(plan)
        where = None if mesh is None else param_shardings(mesh, params, model_axes(target, drafter))
        params = params if plan.apart else jax.device_put(params, where)
        return Engine(target, drafter, params, plan, tokenizer=self.tokenizer, progress=progress)

    def with_stored(self, plan: Plan) -> Plan:
        """The plan, told how the files pack their matrices if it keeps them so."""
        if plan.weights != "packed":
            return plan
        found = {
            f"{role}/{path}": how
            for role, model in self._models.items()
            for path, how in model.stored().items()
        }
        return dataclasses.replace(plan, stored=tuple(sorted(found.items())))

    @property
    def _models(self) -> dict[str, OpenModel]:
        return {"target": self.target} | ({"drafter": self.drafter} if self.drafter else {})


def open_pair(
    target: Source = SHIPPED,
    drafter: Source | None = AUTO,
    *,
    taps: str = AUTO,
    taps_at: str = AUTO,
    tokenizer: Source | None = None,
) -> OpenPair:
    """Opens a pair without reading its weights; arguments as for `load`, and of its plan."""
    tune_allocator()
    from dflash_jax.converters.models import open_model

    target_path, drafter_path = _paths(target, drafter)
    found = open_model(target_path, role="target")
    drafting = open_model(drafter_path, role="drafter", taps=taps) if drafter_path else None
    pair = OpenPair(found, drafting, _tokenizer(found, target_path, tokenizer))
    target_config, drafter_config = pair.configs
    if drafter_config:
        check_pair(target_config, drafter_config, taps_at=taps_at)
    return pair


def _tokenizer(model: OpenModel, path: Path, given: Source | None) -> Tokenizer | None:
    """The tokenizer of a folder that was given, or a model's own."""
    if given is not None:
        folder = locate(given, "target" if str(given) == SHIPPED else "tokenizer")
        found = Tokenizer.from_directory(folder)
        if found is None:
            raise CheckpointError(f"{folder} holds no tokenizer.json; give a folder that does")
        return found
    try:
        return Tokenizer.from_files(model.companions(), where=str(path))
    except TokenizerError as error:
        warnings.warn(f"{error}. Without it only token ids can be given", stacklevel=4)
        return None


def describe(
    target: Source, drafter: Source | None = AUTO, *, taps_at: str = AUTO
) -> tuple[TargetConfig, DrafterConfig | None]:
    """Configs of a pair, checked against each other; needs no weights and reads none.

    `taps_at` is the plan's.
    """
    target_path, drafter_path = _paths(target, drafter)
    whole = _as(TargetConfig, _config(target_path, read_target_config))
    if drafter_path is None:
        return whole, None
    small = _as(DrafterConfig, _config(drafter_path, _read_drafter))
    check_pair(whole, small, taps_at=taps_at)
    return whole, small


def _paths(target: Source, drafter: Source | None) -> tuple[Path, Path | None]:
    if drafter == AUTO:
        drafter = SHIPPED if str(target) == SHIPPED else None
    return locate(target, "target"), locate(drafter, "drafter") if drafter is not None else None


def _config(path: Path, read: Callable[[Path], Config]) -> Config:
    """The config of a .gguf file, of a folder with weights, or of a bare config.json."""
    if path.is_dir() and not is_checkpoint(path) and not list(path.glob("*.safetensors")):
        return read(path)
    from dflash_jax.converters.models import open_model

    return open_model(path).config


def _read_drafter(directory: Path) -> DrafterConfig:
    """A drafter's bare config.json, in the published layout or in speculators' own."""
    from dflash_jax.converters.names import speculators

    where = str(directory / "config.json")
    fields = read_json(directory / "config.json")
    if speculators.is_speculators(fields):
        fields, _ = speculators.published_fields(fields, where=where)
    config = drafter_config(fields, where)
    return dataclasses.replace(config, own_head=bool(config.draft_vocab_size))


def _as(kind: type[AnyConfig], config: Config) -> AnyConfig:
    if not isinstance(config, kind):
        raise ConfigError(
            f"a {kind.__name__} was expected, but the files describe a {type(config).__name__};"
            " target and drafter may have been exchanged"
        )
    return config


def locate(source: Source, role: str) -> Path:
    """Return the directory or .gguf file behind a name, fetched from the hub where it is an id.

    Raises:
      CheckpointError: there is none; says what to give instead.
    """
    return find_local(source, role) or _download(str(source), role)


def _download(repository: str, role: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{repository} is no directory here; to fetch the {role} from the hub"
            f" {install_hint('hub')}"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                ignore_patterns=["*/*"],  # gpt-oss holds the weights a second time in original/
            )
        )
    except Exception as error:  # network, authorisation, unknown repository
        raise CheckpointError(
            f"the {role} {repository} could not be fetched from the hub: {error}"
        ) from error


def load_target(
    source: Source = SHIPPED,
    *,
    dtype: Dtype = "float32",
    tokenizer: Source | None = None,
    compilation_cache: CompilationCache = None,
    progress: bool | None = None,
) -> TargetModel:
    """A target alone, for looking into it; arguments but `dtype` as for `load`.

    Args:
      dtype: of weights and activations: float32, bfloat16 or float16.

    Raises:
      ConfigError, CheckpointError: a model that cannot be run.
      PlanError: JAX finds no device to run on.
    """
    check_not_forked()
    tune_allocator()
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; expected float32, bfloat16 or float16")
    use_compilation_cache(compilation_cache)
    from dflash_jax.converters.models import open_model

    found, shown = open_model(locate(source, "target"), role="target"), is_shown(progress)
    default_device()  # refused before weights are read
    with announced(f"dflash_jax: loading {found.path}", shown=shown):
        params = jax.device_put(found.load(dtype))
    chosen = _tokenizer(found, found.path, tokenizer)
    config = _as(TargetConfig, found.config)
    return TargetModel(config, params, dtype, tokenizer=chosen, progress=shown)
