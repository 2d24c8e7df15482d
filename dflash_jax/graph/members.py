"""Calls of members of targets and drafters, and what steps do where optional ones are absent."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Int

from dflash_jax.kernels.caches import has_caches, put_part, take_part


def call(model: Any, params: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
    """Run a method of a Linen module by `apply`, or of a plain object with its parameters first."""
    if isinstance(model, nn.Module):
        return model.apply({"params": params}, *args, method=method, **kwargs)
    function = getattr(model, method or "__call__")
    return function(params, *args, **kwargs)


def commit(drafter: Any, state: Any, num_committed: Int[Array, " B"]) -> Any:
    """Return a drafter's state once it is known how many observed tokens count."""
    method = getattr(drafter, "commit", None)
    return state if method is None else method(state, num_committed)


def take(drafter: Any, state: Any, row: Any, start: Any, length: int) -> Any:
    """Return the part of a drafter's state that belongs to `length` positions of a row."""
    if has_caches(state):
        return take_part(state, row, start, length)
    method = getattr(drafter, "take", None)
    return () if method is None else method(state, row, start, length)


def put(drafter: Any, state: Any, row: Any, start: Any, part: Any) -> Any:
    """Return a drafter's state with what `take` returned in a row."""
    if has_caches(state):
        return put_part(state, row, start, part)
    method = getattr(drafter, "put", None)
    return state if method is None else method(state, row, start, part)
