"""A target and its drafter, and the target's forward pass."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from dflash_jax.config import LATE
from dflash_jax.kernels.selection import using_kernels
from dflash_jax.models import Drafter
from dflash_jax.state import DecodeState, LayerCache, Logits, Update

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """The modules of a target and its drafter, if any, and the static options of their steps.

    Hashable: part of a program.
    """

    target: nn.Module
    drafter: Drafter | None
    exact: bool = True  # blocks step recurrent layers token by token
    taps_at: str = LATE  # where in a layer the drafter's taps are taken
    keeps_taps: bool = False  # states carry the taps instead of the drafter's caches
    block: int = 1  # tokens of a decode step
    sampled: bool = False  # rows may draw tokens
    min_survival: float = 0.0  # drafts less likely to be accepted are not verified
    kernels: str = "xla"  # of layers, as `Plan.kernels`
    activations: str = "int8"  # that native kernels multiply int8 weights by
    report_drafts: bool = False  # the output of steps that draft has the drafts

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states the drafter reads; the output of layer i is state i + 1."""
        return tuple(i + 1 for i in self.drafter.config.target_layer_ids) if self.drafter else ()

    @property
    def head(self) -> str:
        """Method of the target that drafters use: its head without its softcap."""
        return "raw_logits" if self.target.config.final_softcap else "logits"

    def target_call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Run the target module, or one of its methods by `method=`."""
        with using_kernels(self.kernels, self.activations):
            return self.target.apply({"params": params["target"]}, *args, **kwargs)

    def drafter_call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Run the drafter module, or one of its methods by `method=`."""
        assert self.drafter is not None
        with using_kernels(self.kernels, self.activations):
            return self.drafter.apply({"params": params["drafter"]}, *args, **kwargs)


def forward(
    pair: Pair, params: Params, state: DecodeState, tokens: Int[Array, "B T"], *, chunked: bool
) -> tuple[tuple[Update, ...], tuple[LayerCache, ...], Float[Array, "B T D"]]:
    """Run T tokens of each row through the target, and their taps into the drafter's context.

    With `chunked`, recurrent layers run in their chunked form.

    Returns:
      Updates of the target's caches, the drafter's caches (with `Pair.keeps_taps`, the taps), and
      the target's hidden states.
    """
    # The barriers make XLA compile the target alike in every program. Without that of the
    # positions, it would share the rotary table of the drafter where there is one.
    tokens, start = jax.lax.optimization_barrier((tokens, state.position))
    with jax.named_scope("target"):
        where = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": chunked}
        out = pair.target_call(params, tokens, state.target, start, **where)
    out = jax.lax.optimization_barrier(out)
    context = out.taps if pair.keeps_taps else state.drafter
    if pair.drafter is not None and not pair.keeps_taps:
        context = pair.drafter_call(params, out.taps, context, state.position, method="context")
    return out.caches, context, out.hidden


def logits_of(pair: Pair, params: Params, hidden: Float[Array, "B T D"]) -> Logits:
    """Return the target's logits.

    The barrier keeps XLA from fusing the last sum of the head's product with its readers, which
    differ between programs.
    """
    return jax.lax.optimization_barrier(pair.target_call(params, hidden, method="logits"))
