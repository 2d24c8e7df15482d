"""A target without a drafter, for research: logits and hidden states of whole sequences."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from dflash_jax.config import TargetConfig
from dflash_jax.errors import RequestError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import jit
from dflash_jax.graph.steps.pair import Pair, StepOptions
from dflash_jax.networks import build_target
from dflash_jax.plan import LEAST, Dtype
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.forking import check_not_forked
from dflash_jax.utils.progress import announced


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["logits", "hidden"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """Output of a forward pass without a cache; a pytree, for use in traced functions."""

    logits: Float[Array, "B T V"]  # float32
    hidden: Float[Array, "L+1 B T D"]  # input of layer 0, then the output of each layer


class TargetModel:
    """A target without a drafter, for research. `load_target` makes it.

    Args:
      module: a target of your own with this config; by default one of the config's family.
    """

    def __init__(
        self,
        config: TargetConfig,
        params: dict[str, Any],
        dtype: Dtype,
        *,
        tokenizer: Tokenizer | None = None,
        progress: bool = False,
        module: Any = None,
    ):
        self.config = config
        self.params = params
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.module = build_target(config) if module is None else module
        self._progress = progress
        self._forward = functools.partial(_forward, self.module, dtype)
        self._apply = jit(self._forward)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the parameters are on; None for a single device."""
        places = (getattr(x, "sharding", None) for x in jax.tree.leaves(self.params))
        meshes = (place.mesh for place in places if isinstance(place, NamedSharding))
        return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)

    def with_params(self, params: dict[str, Any]) -> "TargetModel":
        """Return the same target with other parameters."""
        module = self.module
        return TargetModel(self.config, params, self.dtype, tokenizer=self.tokenizer, module=module)

    def forward(self, ids: Sequence[Sequence[int]] | Int[Array, "B T"]) -> ForwardOutput:
        """Return logits and hidden states of token ids [B, T], unpadded, at positions 0 .. T-1.

        The last hidden state is the last layer's output, before the final norm. Every new
        shape [B, T] is compiled once. May be called inside `jax.jit` and the like, where the
        values of traced ids cannot be checked.

        Raises:
          RequestError: ids that are not [B, T] integers of the vocabulary.
        """
        check_not_forked()
        if isinstance(ids, jax.core.Tracer):
            return self.apply(self.params, ids)
        try:
            tokens = np.asarray(ids)
        except ValueError as error:
            raise RequestError("ids have rows of different lengths; pad or split them") from error
        _check_shape(tokens)
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise RequestError(
                f"ids run from {tokens.min()} to {tokens.max()}; the target knows 0 to"
                f" {self.config.vocab_size - 1}"
            )
        with announced("dflash_jax: compiling", shown=self._progress):
            return self._apply(self.params, tokens.astype(np.int32))

    def apply(self, params: dict[str, Any], ids: Int[Array, "B T"]) -> ForwardOutput:
        """Compute `forward` as a pure function of the parameters, for tracing.

        Use it with `jax.jit`, `jax.grad` with respect to `params`, `jax.vmap` over ids, and so on.

        Args:
          params: a tree like `self.params`.
          ids: integers of the vocabulary, which is not checked.

        Raises:
          RequestError: ids that are not [B, T] integers.
        """
        check_not_forked()
        _check_shape(ids)
        return self._forward(params, ids.astype(np.int32))


def _check_shape(ids: Array | np.ndarray) -> None:
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(
            f"ids have shape {ids.shape} and dtype {ids.dtype}; expected integers [B, T]"
        )


def _forward(
    module: Any, dtype: Dtype, params: dict[str, Any], tokens: Int[Array, "B T"]
) -> ForwardOutput:
    rows, width = tokens.shape
    if isinstance(module.config, TargetConfig):  # some rotate by the length of the text
        rope = module.config.rope.for_length(width)
        module = build_target(dataclasses.replace(module.config, rope=rope))
    plan = dataclasses.replace(LEAST, rows=rows, max_length=max(width, 2), dtype=dtype)
    pair = Pair(module).with_options(StepOptions())
    state = PlannedPair(pair, plan).empty_state()
    every = tuple(range(pair.target.config.num_layers + 1))
    params = {"target": params}
    out = pair.target_call(params, tokens, state.target, state.position, taps=every, chunked=True)
    logits = pair.target_call(params, out.hidden, method="logits")
    return ForwardOutput(logits, jax.numpy.stack(out.taps))
