"""A pair under a plan: the shapes of its parameters and state, without any arrays."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.config import ALWAYS_FLOAT32, AUTO, LATE
from dflash_jax.errors import PlanError
from dflash_jax.graph.alike import traced_once
from dflash_jax.graph.keys import ProgramKey, Step, Variant, serving
from dflash_jax.graph.protocols import (
    WEIGHTS,
    SharedLayers,
    WeightInfo,
    is_nnx,
    named_errors,
    nnx_params,
)
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import DecodeState, idle_rules
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.graph.steps.pair import Pair, Params, StepOptions, expect_output
from dflash_jax.kernels.caches import (
    ConvCache,
    LayerCache,
    RecurrentCache,
    empty_cache,
    empty_recurrent,
)
from dflash_jax.kernels.products import (
    abstract,
    abstract_interleaved,
    abstract_stack,
    choose_products,
)
from dflash_jax.plan import LEAST, ResolvedPlan
from dflash_jax.quant.layouts import FLOAT, LAID_OUT, STACK, Spec, spec

JOINED = 8  # chunks that a wide prefill call feeds at once


def path_name(path: Any) -> str:
    """Return a key path of JAX's as text, such as "target/embed"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any, *kept: type) -> dict[str, Any]:
    """Return the leaves of a tree by path; nodes of the kept types count as leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kept))
    return {path_name(path): leaf for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class PlanCacheMaker:
    """Makes the empty caches of a plan, one per layer (a `protocols.CacheMaker`)."""

    plan: ResolvedPlan

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.plan.rows

    @property
    def slots(self) -> int:
        """Positions of a row, and room for the widest call after them."""
        return self.plan.slots

    @property
    def dtype(self) -> Any:
        """Dtype of activations."""
        return jnp.dtype(self.plan.compute_dtype)

    def __call__(self, kv_heads: int, head_dim: int, window: int | None) -> LayerCache:
        """Return the cache of an attention layer."""
        plan = self.plan
        ring = plan.ring_slots(window)
        dtype = self.dtype if plan.kv_dtype == "auto" else jnp.dtype(plan.kv_dtype)
        return empty_cache(
            plan.rows,
            kv_heads,
            ring or plan.slots,
            head_dim,
            dtype=dtype,
            ring=ring is not None,
        )

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache:
        """Return the cache of a recurrent layer: state [N, P, Q] and convolution inputs [W, C]."""
        return empty_recurrent(self.plan.rows, state, inputs, dtype=self.dtype)

    def conv(self, inputs: tuple[int, int]) -> ConvCache:
        """Return the cache of a convolution: its inputs [W, C]."""
        return ConvCache(jnp.zeros((self.plan.rows, *inputs), self.dtype))


class PlannedPair:
    """A pair under a plan whose choices are made.

    Attributes:
      pair: the modules, with the options of steps that the plan has.
      plan: the plan.
      mesh: devices for the plan's mesh; None for the first ones (`placement.mesh_of`).
    """

    def __init__(self, pair: Pair, plan: ResolvedPlan, mesh: Mesh | None = None):
        """Set the options of steps.

        Raises:
          PlanError: the pair has an acceptance of its own, and the plan is exact.
        """
        if plan.exact and pair.acceptance is not None:
            name = getattr(pair.acceptance, "__name__", pair.acceptance)
            raise PlanError(
                f"the pair has an acceptance of its own, {name}, and the plan is exact: its drafted"
                " output equals plain output; plan with exact=False"
            )
        options = StepOptions(
            exact=plan.exact,
            taps_at=LATE if plan.taps_at == AUTO else plan.taps_at,
            block=plan.block,
            confidence_threshold=plan.confidence_threshold,
            kernels=plan.kernels,
            report_drafts=plan.report_drafts,
            report_top=plan.report_top,
            draft_window=plan.draft_window,
            ngram=plan.ngram,
        )
        self.pair = pair.with_options(options)
        self.plan = plan
        self.mesh = mesh

    @property
    def config(self) -> Any:
        """The target's config."""
        return self.pair.target.config

    @property
    def drafter_config(self) -> Any:
        """Config of the drafter, or the drafter itself if it has none; None without a drafter."""
        return getattr(self.pair.drafter, "config", self.pair.drafter)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """End tokens of the target."""
        return tuple(getattr(self.config, "eos_token_ids", ()))

    @property
    def target_name(self) -> str:
        """Family of the target, or its class."""
        return getattr(self.config, "model_type", "") or type(self.pair.target).__name__

    @property
    def drafter_name(self) -> str:
        """Kind of the drafter, or its class; "none" without a drafter."""
        drafter = self.pair.drafter
        kind = getattr(getattr(drafter, "config", drafter), "kind", "")
        return kind or ("none" if drafter is None else type(drafter).__name__)

    @property
    def width_invariant(self) -> bool:
        """Whether a token's bits do not depend on the width of a call."""
        return self.plan.kernels == "native" and getattr(self.pair.target, "width_invariant", False)

    @functools.cached_property
    def wide_prefill(self) -> int:
        """Tokens of the calls that feed several chunks of a long prompt at once; 0 for none.

        There are such calls where no bit depends on the width, and chunks can be cut from the
        caches afterwards (not from rings and recurrent states).
        """
        plan = self.plan
        state = self.state
        whole = _keeps_all((state.target, state.drafter), plan.slots)
        width = JOINED * plan.chunk
        return width if self.width_invariant and whole and width < plan.max_length else 0

    def key(self, step: Step, variant: Variant = Variant.GREEDY) -> ProgramKey:
        """Return the key of the program in which a step serves a variant's requests."""
        return ProgramKey(step, serving(variant, self.plan.kernels))

    def wide_part(self, start: int, left: int, variant: Variant = Variant.GREEDY) -> int:
        """Return how many of a prompt's next tokens a wide call feeds; 0 if chunks are as fast.

        Args:
          start: tokens that were fed before.
          left: tokens that are left of the prompt.
          variant: in which the token after the prompt is decided.
        """
        width = self.wide_prefill
        if self.key(Step.PREFILL, variant) != self.key(Step.PREFILL):
            left -= 1  # a wide call decides tokens of the greedy variant's programs only
        worth = 2 * left > width > 0 and start + width <= self.plan.slots
        return min(left, width) if worth else 0

    @functools.cached_property
    def state(self) -> DecodeState:
        """Shapes and dtypes of a state."""
        return jax.eval_shape(self.empty_state)

    def empty_state(self) -> DecodeState:
        """Return a state with every row at position 0."""
        plan = self.plan
        drafter = ()
        with named_errors(self.pair.target, "empty_caches"):
            target = tuple(self.pair.target.empty_caches(PlanCacheMaker(plan)))
        if self.pair.drafter is not None:
            # Rings of a drafter alone, unless asked for, are not worth the wider calls that they
            # would rule out.
            alone = (
                not plan.draft_window and self.width_invariant and _keeps_all(target, plan.slots)
            )
            rings = plan.rings and not alone
            caches = drafter_caches(self.pair, dataclasses.replace(plan, rings=rings))
            with named_errors(self.pair.drafter, "empty"):
                drafter = self.pair.proposer.empty(caches)
        return DecodeState(
            target=target,
            drafter=drafter,
            position=jnp.zeros((plan.rows,), jnp.int32),
            anchor=jnp.zeros((plan.rows,), jnp.int32),
        )

    @functools.cached_property
    def params(self) -> Params:
        """Shapes and dtypes of all parameters, by role.

        Token ids stay integers, and parameters in `ALWAYS_FLOAT32` stay float32.
        """
        plan = self.plan
        forms = self.forms
        specs = self.specs
        native = plan.kernels == "native"
        roles = {path.split("/")[0] for path in forms}  # whose models declare their weights
        dtype = jnp.dtype(plan.dtype)

        def planned(path: Any, x: jax.ShapeDtypeStruct) -> Any:
            name = path_name(path)
            key = str(getattr(path[-1], "key", ""))
            form = forms.get(name, FLOAT)
            if form == STACK and (name in specs or native):
                kind = specs[name][1][0][0] if name in specs else FLOAT
                return abstract_stack(x.shape, kind, dtype)
            if name in specs:
                packed = abstract(x.shape, specs[name], dtype)
                return abstract_interleaved(packed) if native else packed
            kept = not jnp.issubdtype(x.dtype, jnp.floating) or key in ALWAYS_FLOAT32
            widened = form == FLOAT and path[0].key in roles
            chosen = jnp.dtype(plan.compute_dtype) if widened else dtype
            stored = jax.ShapeDtypeStruct(x.shape, x.dtype if kept else chosen)
            return abstract_interleaved(stored) if native and form in LAID_OUT else stored

        shapes = jax.tree_util.tree_map_with_path(planned, self._variables("params"))
        return choose_products(shapes, plan.kernels, plan.activations)

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        """How each packed parameter is packed, by its path with the role in front.

        A file's blocks stay as they are. Beside packed ones native kernels read a drafter's other
        matrices in int8, as it decides nothing: in float32 they took a third of a drafted step.
        """
        plan = self.plan
        if plan.weights == "float":
            return {}
        packed = plan.weights == "packed"
        specs: dict[str, Spec] = dict(plan.stored) if packed else {}
        rounded = ["target", "drafter"]
        if packed:
            rounded = ["drafter"] if plan.kernels == "native" else []
        leaves = by_path(self._variables("params"))
        for path, form in self.forms.items():
            role = path.split("/")[0]
            if path in specs or role not in rounded:
                continue
            weights = "int8" if packed else plan.weights
            if chosen := spec(weights, role, form, leaves[path].shape):
                specs[path] = chosen
        return specs

    @property
    def forms(self) -> dict[str, str]:
        """The form of each weight that is declared, by path with the role."""
        return {path: info.form for path, info in self.declared.items()}

    @functools.cached_property
    def declared(self) -> dict[str, WeightInfo]:
        """Weights that may be stored in other forms, by path with the role."""
        return by_path(self._variables(WEIGHTS), WeightInfo)

    @property
    def model_axes(self) -> dict[str, int]:
        """The axis of each weight that a mesh may split, by path with the role."""
        split = {path: info.split for path, info in self.declared.items()}
        return {path: axis for path, axis in split.items() if axis is not None}

    def _variables(self, kind: str) -> dict[str, Any]:
        """Return shapes of the variables of a kind, by role."""
        # With the default kernels, so that they are traced once for all plans.
        pair = self.pair.with_options(StepOptions())
        by_role = {"target": _variables(pair.target, None)}
        if pair.drafter is not None:
            by_role["drafter"] = _variables(pair.target, pair.drafter)
        return {role: variables.get(kind, {}) for role, variables in by_role.items()}


def _keeps_all(caches: Any, slots: int) -> bool:
    """Whether caches have a slot for every position of a row."""

    def keeps(cache: Any) -> bool:
        if isinstance(cache, LayerCache):
            return not cache.ring and cache.slots >= slots
        return cache.ndim == 2 and cache.shape[1] >= slots  # the tokens themselves

    kinds = (LayerCache, RecurrentCache, ConvCache)
    cache_leaves = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, kinds))
    return all(not isinstance(x, RecurrentCache | ConvCache) and keeps(x) for x in cache_leaves)


def drafter_caches(pair: Pair, plan: ResolvedPlan) -> PlanCacheMaker:
    """Return the maker of a drafter's caches.

    A drafter may read longer blocks than are verified, and the tokens of several steps.
    """
    reads = getattr(pair.drafter, "reads", 0)
    widest = max(plan.block, reads, plan.steps_per_call)
    return PlanCacheMaker(dataclasses.replace(plan, block=widest))


def cast_params(params: Params, dtype: str) -> Params:
    """Cast the floats of a model's parameters, except for those in `ALWAYS_FLOAT32`."""

    def one(path: Any, x: Any) -> Any:
        name = getattr(path[-1], "key", "")
        kept = name in ALWAYS_FLOAT32 or not jnp.issubdtype(x.dtype, jnp.floating)
        return x if kept else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def init_params(pair: Pair, key: jax.Array) -> Params:
    """Return fresh parameters of both models, in float32; of NNX modules, those that they have."""
    params = {"target": _initial(pair.target, None, key).get("params", {})}
    if pair.drafter is not None:
        params["drafter"] = _initial(pair.target, pair.drafter, key).get("params", {})
    return params


@functools.lru_cache(maxsize=32)
@isolated_jax_config()
def _variables(target: Any, drafter: Any) -> dict[str, Any]:
    """Return shapes of a model's variables, as float32."""

    def initial() -> dict[str, Any]:
        with traced_once():
            return _initial(target, drafter, jax.random.key(0))

    return jax.eval_shape(initial)


def _initial(target: Any, drafter: Any, key: jax.Array) -> dict[str, Any]:
    """Return the variables of the target, or of its drafter if that is given."""
    model = target if drafter is None else drafter
    if is_nnx(model):
        return {"params": nnx_params(model)}
    if not isinstance(model, nn.Module):
        init = getattr(model, "init", None)
        if init is None:
            return {}
        with named_errors(model, "init"):
            return {"params": init(key)}
    tokens = jnp.zeros((1, 1), jnp.int32)
    start = jnp.zeros((1,), jnp.int32)
    if drafter is None:
        with named_errors(model, "init"):
            caches = target.empty_caches(PlanCacheMaker(LEAST))
            return dict(model.init(key, tokens, caches, start, method=_all_of_target))
    c = target.config
    state = drafter.empty(drafter_caches(Pair(target, drafter), LEAST))
    taps = [jnp.zeros((1, 1, c.hidden_size), jnp.float32)] * len(drafter.taps)
    shared = SharedLayers(
        lambda tokens: jnp.zeros((*tokens.shape, c.hidden_size), jnp.float32),
        lambda hidden: jnp.zeros((*hidden.shape[:-1], c.vocab_size), jnp.float32),
    )
    sampler = RowDraftSampler(
        idle_rules(LEAST), start, start, 1, sampled=False, vocab_size=c.vocab_size, kernels="xla"
    )
    arguments = (state, tokens, taps, start, shared, sampler)
    with named_errors(model, "init"):
        return dict(model.init(key, *arguments, method=_all_of_drafter))


def _all_of_target(module: Any, tokens: Any, caches: Any, start: Any) -> Any:
    """Run every method that may declare parameters."""
    embedded = module.embed(tokens)
    out = module(tokens, caches, start)
    expect_output(module, out, (*tokens.shape, len(caches)))
    return embedded, module.logits(out.hidden)


def _all_of_drafter(
    module: Any, state: Any, tokens: Any, taps: Any, start: Any, shared: Any, sampler: Any
) -> Any:
    """Run every method that may declare parameters.

    Proposing begins with the state as it was: what is observed may need a commit first.
    """
    module.observe(state, tokens, taps, start)
    return module.propose(state, start, start, shared, sampler)
