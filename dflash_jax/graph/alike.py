"""Layers that are alike, traced once: only shapes are wanted of an abstract initialisation."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

BOUND = ("parent", "name")  # fields of a Flax module that say where it is


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Trace the call of a Flax module once for all modules that are alike, while the block runs.

    Those have the same class and equal fields, and their arguments the same shapes. The others
    declare what the first one declared, and return what it returned, which has the right shapes
    and no more than these: thirty layers take the time of one.
    """
    known: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        key = _form(module, args, kwargs) if context.method_name == "__call__" else None
        if key is None:
            return call(*args, **kwargs)
        if key not in known:
            before = _lacking(module.variables, {})
            result = call(*args, **kwargs)
            known[key] = result, _lacking(module.variables, before)
            return result
        result, declared = known[key]
        for collection, values in _lacking(declared, {}).items():  # each module has its own
            for name, value in values.items():
                module.put_variable(collection, name, value)
        return result

    with nn.intercept_methods(intercept):
        yield


def _form(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a call's shapes depend on; None if that cannot be compared."""
    fields = tuple(
        getattr(module, field.name)
        for field in dataclasses.fields(module)  # pyrefly: ignore[bad-argument-type]
        if field.name not in BOUND
    )
    leaves, tree = jax.tree.flatten((args, kwargs))
    form = type(module), fields, tree, tuple(map(_abstract, leaves))
    try:
        hash(form)
    except TypeError:
        return None
    return form


def _abstract(leaf: Any) -> Any:
    """Return the shape and the dtype of an array, and other values as they are."""
    return (leaf.shape, str(leaf.dtype)) if isinstance(leaf, jax.Array) else leaf


def _lacking(variables: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested variables that others lack, in new dicts."""
    lacking: dict[str, Any] = {}
    for name, value in variables.items():
        if not isinstance(value, Mapping):
            lacking |= {} if name in others else {name: value}
        elif inner := _lacking(value, others.get(name, {})):
            lacking[name] = inner
    return lacking
