"""How large the inputs of a target's matrices are, from which importance matrices are made."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.errors import RequestError
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import jit
from dflash_jax.networks import build_pair
from dflash_jax.nn.layers import Watched
from dflash_jax.plan import LEAST
from dflash_jax.quant.layouts import MATRIX, STACK
from dflash_jax.target_model import TargetModel
from dflash_jax.tokenizer import Tokenizer

SEPARATOR = "/"  # between the parts of a path


class Inputs(NamedTuple):
    """Sums of squares of a matrix' inputs, [D] or [E, D], over numbers of tokens, [] or [E]."""

    squares: Any
    tokens: Any


def measure(
    model: TargetModel,
    chunks: Sequence[Sequence[int]],
    done: Callable[[int], None] = lambda count: None,
) -> dict[str, Inputs]:
    """Return the inputs of the matrices of a target's layers, by path of the parameter.

    Args:
      chunks: tokens, run chunk by chunk, all of one length.
      done: told how many chunks are done.

    Raises:
      RequestError: there is no chunk, or the target's weights are not plain arrays.
    """
    if not chunks:
        raise RequestError("no chunks were given; give at least one")
    prefix = f"target{SEPARATOR}"
    declared = PlannedPair(build_pair(model.config), LEAST).forms
    watched = {p.removeprefix(prefix) for p, form in declared.items() if form in (MATRIX, STACK)}
    run = jit(functools.partial(_inputs, model, frozenset(watched)))
    total: dict[str, Inputs] = {}
    for i, chunk in enumerate(chunks):
        for path, inputs in run(model.params, np.asarray([chunk], np.int32)).items():
            one = Inputs(*(np.asarray(each, np.float64) for each in inputs))
            before = total.get(path)
            total[path] = one if before is None else Inputs(*map(np.add, before, one))
        done(i + 1)
    return total


def chunks_of(tokenizer: Tokenizer, text: str, size: int) -> list[list[int]]:
    """Return a text in chunks of `size` tokens, each with the tokenizer's start tokens before it.

    Models that were trained with a start token have other inputs without one. What is left of the
    text after the last whole chunk is left out.
    """
    whole = tokenizer.encode(text)
    body = tokenizer.encode(text, specials=False)
    start = next(at for at in range(len(whole) + 1) if whole[at : at + len(body)] == body)
    step = size - start
    ends = range(step, len(body) + 1, step)
    return [whole[:start] + body[end - step : end] for end in ends]


def _inputs(
    model: TargetModel, watched: frozenset[str], params: dict[str, Any], ids: Int[Array, "1 T"]
) -> dict[str, Inputs]:
    """Run a chunk of tokens, and return the inputs of matrices."""
    inputs: dict[str, Inputs] = {}

    def wrap(path: Any, leaf: Any) -> Any:
        name = SEPARATOR.join(str(key.key) for key in path)

        def watch(squares: Float[Array, "*E D"], tokens: Float[Array, "*E"]) -> None:
            inputs[name] = Inputs(squares, tokens)

        return Watched(leaf, watch) if name in watched else leaf

    model.apply(jax.tree_util.tree_map_with_path(wrap, params), ids)
    return inputs
