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
class Pair:
    """The modules of a target and its drafter, if any, and the static options of their steps.

    Hashable: part of a program. `Graph` sets the options from its plan.
    """

    target: Any  # a `protocols.Target`
    drafter: Any = None  # a `protocols.Drafter`
    exact: bool = True  # blocks step recurrent layers token by token
    taps_at: str = LATE  # where in a layer the drafter's taps are taken
    keeps_taps: bool = False  # states carry an `Observed` instead of the drafter's state
    block: int = 1  # tokens of a decode step
    sampled: bool = False  # rows may draw tokens
    min_survival: float = 0.0  # drafts less likely to be accepted are not verified
    kernels: str = "xla"  # of steps and of modules that have the field, as `Plan.kernels`
    report_drafts: bool = False  # the output of steps that draft has the drafts
    report_top: int = 0  # most probable tokens that outputs have, and drafts with them
    draft_window: int = 0  # positions that the drafter sees; 0 for as many as it was made for
    ngram: int = 0  # tokens of a match in the text that replaces drafts; 0 for never
    acceptance: protocols.Acceptance | None = None  # in place of equality; in inexact plans only

    def __post_init__(self) -> None:
        """Set the kernels of the modules."""
        for role in ("target", "drafter"):
            model = protocols.with_kernels(getattr(self, role), self.kernels)
            object.__setattr__(self, role, model)

    @property
    def proposer(self) -> Any:
        """The drafter as the plan uses it: in a window, after copies from the text."""
        window, drafter = self.draft_window, self.drafter
        drafter = drafter.windowed(window) if window and drafter is not None else drafter
        return with_copies(drafter, self.ngram)

    @property
    def copies(self) -> bool:
        """Whether drafts may be copied from the text."""
        return isinstance(self.proposer, NGram | Copying)

    @property
    def skips_dead_tokens(self) -> bool:
        """Whether tokens that do not count cost nothing in the target's forward pass."""
        return self.kernels == "native" and protocols.takes(self.target, "num_live")

    @property
    def keeps_logits(self) -> bool:
        """Whether drafts have the drafter's logits."""
        return self.report_top > 0 or self.acceptance is not None

    def output_sizes(self, tokens: int, *, drafts: bool) -> OutputSizes:
        """Return the sizes of the output of a step over so many tokens, which may be drafts."""
        top = min(self.report_top, self.target.config.vocab_size)
        reported = drafts and (self.report_drafts or top > 0)
        return OutputSizes(tokens, tokens - 1 if reported else 0, top)

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states the drafter reads; the output of layer i is state i + 1."""
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
        arguments = (state, observed.tokens, observed.taps, start)
        if num_live is not None and protocols.takes(self.proposer, "num_live", "observe"):
            arguments = (*arguments, num_live)
        return self.drafter_call(params, *arguments, method="observe")

    def committed(self, before: Any, observed: Any, num_committed: Int[Array, " B"]) -> Any:
        """Return the drafter's state after the first of the tokens that it observed last.

        Args:
          before: its state before it observed them.
        """
        if self.keeps_taps:
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
      Updates of the target's caches, the drafter's state (with `Pair.keeps_taps`, what it has to
      observe), and the target's hidden states.
    """
    # The barriers make XLA compile the target alike in every program. Without that of the
    # positions, it would share the rotary table of the drafter where there is one.
    tokens, start = jax.lax.optimization_barrier((tokens, state.position))
    if pair.skips_dead_tokens:
        num_live = jax.lax.optimization_barrier(num_live)
    with jax.named_scope("target"):
        where: dict[str, Any] = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": chunked}
        if pair.skips_dead_tokens:
            where["num_live"] = num_live
        out = pair.target_call(params, tokens, state.target, start, **where)
    expect_output(pair.target, out, (*tokens.shape, len(state.target)), pair.taps)
    out = jax.lax.optimization_barrier(out)
    observed = Observed(tokens, out.taps)
    if pair.keeps_taps:
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
    live: dict[str, Any] = {"num_live": num_live} if skips else {}
    logits = pair.target_call(params, hidden, method="logits", **live)
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
