"""A target and its drafter, and the target's forward pass."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.config import LATE
from dflash_jax.errors import PlanError
from dflash_jax.graph import protocols
from dflash_jax.graph.copying import Copying, with_copies
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.protocols import SharedLayers
from dflash_jax.graph.state import DecodeState, Logits, OutputSizes, described, expect_state
from dflash_jax.kernels.caches import Update

Params = dict[str, Any]


@struct.dataclass
class Observed:
    """What a drafter observes of a call of the target, where it does so later."""

    tokens: Int[Any, "B T"]
    taps: tuple[Float[Any, "B T D"], ...]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Static options of the steps of a pair, which follow from a plan; see `Plan`.

    Attributes:
      exact: whether blocks step recurrent layers token by token.
      taps_at: where in a layer the drafter's taps are taken, `LATE` or `EARLY`.
      keeps_taps: whether states carry an `Observed` in place of the drafter's state.
      block: number of tokens of a decode step.
      sampled: whether rows may draw tokens.
      confidence_threshold: drafts that are less likely to be accepted are not verified.
      kernels: kernels of steps, and of modules that have the field, as in `Plan.kernels`.
      report_drafts: whether the output of steps that draft has the drafts.
      report_top: number of most probable tokens that outputs have, and drafts with them.
      draft_window: number of positions that the drafter sees; 0 for as many as it was made for.
      ngram: number of equal tokens after which drafts are copied from the text; 0 for never.
    """

    exact: bool = True
    taps_at: str = LATE
    keeps_taps: bool = False
    block: int = 1
    sampled: bool = False
    confidence_threshold: float = 0.0
    kernels: str = "xla"
    report_drafts: bool = False
    report_top: int = 0
    draft_window: int = 0
    ngram: int = 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """The modules of a target and its drafter. Hashable: part of a program.

    Attributes:
      target: a `protocols.Target`.
      drafter: a `protocols.Drafter`; None to decode plainly.
      acceptance: decides how many drafts are kept, in place of equality with the target's choices;
        for inexact plans only.
      options: options of its steps, which `Graph` sets from its plan.
    """

    target: Any
    drafter: Any = None
    acceptance: protocols.Acceptance | None = None
    options: StepOptions = StepOptions()

    def with_options(self, options: StepOptions) -> "Pair":
        """Return the pair with other options of its steps, and their kernels in its modules."""
        return dataclasses.replace(
            self,
            target=protocols.with_kernels(self.target, options.kernels),
            drafter=protocols.with_kernels(self.drafter, options.kernels),
            options=options,
        )

    @property
    def proposer(self) -> Any:
        """The drafter as the plan uses it: in a window, after copies from the text."""
        drafter = self.drafter
        if self.options.draft_window and drafter is not None:
            drafter = drafter.windowed(self.options.draft_window)
        return with_copies(drafter, self.options.ngram)

    @property
    def copies(self) -> bool:
        """Whether drafts may be copied from the text."""
        return isinstance(self.proposer, NGram | Copying)

    @property
    def skips_dead_tokens(self) -> bool:
        """Whether tokens that do not count cost nothing in the target's forward pass."""
        return self.options.kernels == "native" and protocols.takes(self.target, "num_live")

    @property
    def keeps_logits(self) -> bool:
        """Whether drafts have the drafter's logits."""
        return self.options.report_top > 0 or self.acceptance is not None

    def output_sizes(self, num_tokens: int, *, drafting: bool) -> OutputSizes:
        """Return the sizes of the output of a step over so many tokens of each row.

        Args:
          drafting: whether the tokens are an anchor and its drafts.
        """
        top = min(self.options.report_top, self.target.config.vocab_size)
        num_drafts = 0
        if drafting and (self.options.report_drafts or top > 0):
            num_drafts = num_tokens - 1
        return OutputSizes(num_tokens, num_drafts, top)

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of the hidden states that the drafter reads; layer i makes state i + 1."""
        return self.drafter.taps if self.drafter is not None else ()

    def shared(self, params: Params) -> SharedLayers:
        """Return the target's embedding, and its head without its softcap, for drafters."""
        head = "raw_logits" if hasattr(self.target, "raw_logits") else "logits"
        return SharedLayers(
            functools.partial(self.target_call, params, method="embed"),
            functools.partial(self.target_call, params, method=head),
        )

    def target_call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Run the target, or one of its methods by `method=`."""
        return protocols.call(self.target, params["target"], *args, **kwargs)

    def drafter_call(self, params: Params, *args: Any, method: Any) -> Any:
        """Run a method of the drafter, or a function of it."""
        return protocols.call(self.proposer, params.get("drafter", {}), *args, method=method)

    def observe(
        self,
        params: Params,
        state: Any,
        observed: Observed,
        start: Int[Array, " B"],
        num_live: Int[Array, " B"] | None = None,
    ) -> Any:
        """Return the drafter's state after what it observed, before `committed`.

        Args:
          num_live: tokens of each row that count, the first ones; all by default.
        """
        if self.drafter is None:
            return state
        arguments = [state, observed.tokens, observed.taps, start]
        if num_live is not None and protocols.takes(self.proposer, "num_live", "observe"):
            arguments.append(num_live)
        return self.drafter_call(params, *arguments, method="observe")

    def committed(self, before: Any, observed: Any, num_committed: Int[Array, " B"]) -> Any:
        """Return the drafter's state after the first of the tokens that it observed last.

        Args:
          before: its state before it observed them.
        """
        if self.options.keeps_taps:
            return observed
        state = protocols.commit(self.proposer, observed, num_committed)
        plain = getattr(self.proposer, "commit", None) is None
        member = "observe" if plain else "commit"
        expect_state(state, before, f"{type(self.drafter).__name__}.{member}", "empty")
        return state


def forward(
    pair: Pair,
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    *,
    chunked: bool,
    num_live: Int[Array, " B"] | None = None,
) -> tuple[tuple[Update, ...], Any, Float[Array, "B T D"]]:
    """Run T tokens of each row through the target, and let the drafter observe them.

    Args:
      chunked: recurrent layers run in their chunked form.
      num_live: tokens of each row that count, the first ones; all by default. Native kernels do
        not compute the others.

    Returns:
      Updates of the target's caches, the drafter's state (with `StepOptions.keeps_taps`, what it
      has to observe), and the target's hidden states.
    """
    # The barriers make XLA compile the target alike in every program. Without that of the
    # positions, it would share the rotary table of the drafter where there is one.
    tokens, start = jax.lax.optimization_barrier((tokens, state.position))
    if pair.skips_dead_tokens:
        num_live = jax.lax.optimization_barrier(num_live)
    options = pair.options
    call = functools.partial(
        pair.target_call,
        params,
        taps=pair.taps,
        taps_at=options.taps_at,
        chunked=chunked,
    )
    with jax.named_scope("target"):
        if pair.skips_dead_tokens:
            out = call(tokens, state.target, start, num_live=num_live)
        else:
            out = call(tokens, state.target, start)
    expect_output(pair.target, out, (*tokens.shape, len(state.target)), pair.taps)
    out = jax.lax.optimization_barrier(out)
    observed = Observed(tokens, out.taps)
    if options.keeps_taps:
        return out.caches, observed, out.hidden
    observing = num_live if pair.skips_dead_tokens else None
    drafter = pair.observe(params, state.drafter, observed, state.position, observing)
    return out.caches, drafter, out.hidden


def logits_of(
    pair: Pair,
    params: Params,
    hidden: Float[Array, "B T D"],
    num_live: Int[Array, " B"] | None = None,
) -> Logits:
    """Return the target's logits; those of tokens that do not count are undefined.

    The barrier keeps XLA from fusing the last sum of the head's product with its readers, which
    differ between programs.

    Args:
      num_live: as for `forward`.
    """
    skips = num_live is not None and protocols.takes(pair.target, "num_live", "logits")
    if skips:
        logits = pair.target_call(params, hidden, method="logits", num_live=num_live)
    else:
        logits = pair.target_call(params, hidden, method="logits")
    shape = (*hidden.shape[:2], pair.target.config.vocab_size)
    expect_floats(pair.target, "logits", logits, shape, "B, T, config.vocab_size")
    # As rows: XLA would copy all logits to give those beyond a barrier another shape.
    rows = jax.lax.optimization_barrier(logits.reshape(-1, shape[2]))
    return rows.reshape(shape)


def expect_output(
    target: Any, out: Any, sizes: tuple[int, int, int], asked: tuple[int, ...] = ()
) -> None:
    """Check the result of a target's forward pass.

    Args:
      sizes: numbers of rows, tokens and caches that it was given.
      asked: taps that it was asked for.

    Raises:
      PlanError: it is no `TargetOutput`, or its arrays have other shapes.
    """
    rows, tokens, caches = sizes
    name = f"{type(target).__name__}.__call__"
    parts = [getattr(out, part, None) for part in ("hidden", "taps", "caches")]
    if any(part is None for part in parts) or not isinstance(out.taps, tuple | list):
        raise PlanError(
            f"{name} returned {described(out)}; expected a dj.graph.TargetOutput(hidden, taps,"
            " caches)"
        )
    if len(out.taps) != len(asked):
        raise PlanError(
            f"{name} returned {len(out.taps)} taps; expected {len(asked)}, the hidden states"
            f" {asked} that it was asked for"
        )
    wanted = (rows, tokens, target.config.hidden_size)
    expect_floats(target, "__call__ as hidden", out.hidden, wanted, "B, T, config.hidden_size")
    for tap, x in zip(asked, out.taps, strict=True):
        expect_floats(target, f"__call__ for tap {tap}", x, wanted, "B, T, config.hidden_size")
    if len(out.caches) != caches:
        raise PlanError(
            f"{name} returned {len(out.caches)} updates; expected one for each of the {caches}"
            " caches"
        )
    for i, update in enumerate(out.caches):
        if not callable(getattr(update, "commit", None)):
            raise PlanError(
                f"{name} returned {described(update)} as the update of cache {i}; expected a"
                " dj.graph.LayerCache, or a pytree with commit(num_committed)"
            )


def expect_floats(model: Any, member: str, x: Any, shape: tuple[int, ...], letters: str) -> None:
    """Check that a member returned floats of a shape.

    Raises:
      PlanError: it did not.
    """
    floats = jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.floating)
    if not floats or x.shape != shape:
        raise PlanError(
            f"{type(model).__name__}.{member} returned {described(x)}; expected floats"
            f" {[*shape]} [{letters}]"
        )
