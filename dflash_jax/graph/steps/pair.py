"""A target and its drafter, and the target's forward pass."""

import dataclasses
import functools
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.config import LATE
from dflash_jax.graph import protocols
from dflash_jax.graph.copying import Copying, with_copies
from dflash_jax.graph.ngram import NGram
from dflash_jax.graph.protocols import SharedLayers
from dflash_jax.graph.state import DecodeState, Logits, OutputSizes
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
        self, params: Params, state: Any, observed: Observed, start: Int[Array, " B"]
    ) -> Any:
        """Return the drafter's state after what it observed, before `committed`."""
        if self.drafter is None:
            return state
        arguments = (state, observed.tokens, observed.taps, start)
        return self.drafter_call(params, *arguments, method="observe")

    def committed(self, state: Any, num_committed: Int[Array, " B"]) -> Any:
        """Return the drafter's state after the first of the tokens that it observed last."""
        return state if self.keeps_taps else protocols.commit(self.proposer, state, num_committed)


def forward(
    pair: Pair, params: Params, state: DecodeState, tokens: Int[Array, "B T"], *, chunked: bool
) -> tuple[tuple[Update, ...], Any, Float[Array, "B T D"]]:
    """Run T tokens of each row through the target, and let the drafter observe them.

    With `chunked`, recurrent layers run in their chunked form.

    Returns:
      Updates of the target's caches, the drafter's state (with `Pair.keeps_taps`, what it has to
      observe), and the target's hidden states.
    """
    # The barriers make XLA compile the target alike in every program. Without that of the
    # positions, it would share the rotary table of the drafter where there is one.
    tokens, start = jax.lax.optimization_barrier((tokens, state.position))
    with jax.named_scope("target"):
        where = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": chunked}
        out = pair.target_call(params, tokens, state.target, start, **where)
    out = jax.lax.optimization_barrier(out)
    observed = Observed(tokens, out.taps)
    if pair.keeps_taps:
        return out.caches, observed, out.hidden
    return out.caches, pair.observe(params, state.drafter, observed, state.position), out.hidden


def logits_of(pair: Pair, params: Params, hidden: Float[Array, "B T D"]) -> Logits:
    """Return the target's logits.

    The barrier keeps XLA from fusing the last sum of the head's product with its readers, which
    differ between programs.
    """
    return jax.lax.optimization_barrier(pair.target_call(params, hidden, method="logits"))
