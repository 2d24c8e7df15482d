"""Modules compute by the kernels of their graph's plan, in its programs and outside of them."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from benchmarks.audit.models import DRAFTERS, FAMILIES
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.keys import Step
from dflash_jax.graph.programs import declare
from dflash_jax.kernels.native.build import library
from dflash_jax.networks import build_pair
from dflash_jax.plan import LEAST
from dflash_jax.testing import Scripted, tiny_drafter

PLAN = dataclasses.replace(LEAST, max_length=64, block=4, chunk=8, ngram=3, draft_window=8)
PAIRS = {name: (config, "dflash") for name, config in FAMILIES.items()}
PAIRS |= {name: (FAMILIES["llama"], name) for name in DRAFTERS}


def kernels_that_run(pair: dj.Pair, **plan: Any) -> set[str]:
    """Return the kernels of all modules that have some, of the programs of a pair."""
    planned, found = PlannedPair(pair, dataclasses.replace(PLAN, **plan)), set()
    programs = declare(planned)

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if hasattr(context.module, "kernels"):
            found.add(context.module.kernels)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        for step in (Step.PREFILL, Step.SPECULATIVE):
            program = programs[planned.key(step)]
            jax.eval_shape(program.function, *program.arguments)
    return found


@pytest.mark.sample("dflash, full")
@pytest.mark.parametrize("name", PAIRS)
def test_all_modules_of_a_pair_have_the_kernels_of_the_plan(name: str) -> None:
    target, drafter = PAIRS[name]
    kind, own = DRAFTERS[drafter]
    pair = build_pair(target, tiny_drafter(target, kind, **own))
    assert kernels_that_run(pair, kernels="native") == {"native"}


def test_a_drafter_inside_of_another_has_them_too() -> None:
    target, plan = FAMILIES["llama"], {"kernels": "native", "draft_window": 0}
    native = build_pair(target, tiny_drafter(target))
    pair = dataclasses.replace(native, drafter=Scripted(native.drafter, length=80))
    assert kernels_that_run(pair, **plan) == {"native"}
    planned = PlannedPair(pair, dataclasses.replace(PLAN, **plan)).pair
    assert kernels_that_run(planned, **plan | {"kernels": "xla"}) == {"xla"}


@pytest.mark.exhaustive
@pytest.mark.skipif(not library(), reason=f"there are no native kernels: {library().reason}")
def test_a_graphs_target_has_the_bits_of_its_programs_where_it_is_applied(tiny: Engine) -> None:
    graph, params = tiny.graph, {"params": tiny.params["target"]}
    prompt = np.arange(graph.plan.chunk, dtype=np.int32)
    state, _ = graph.compile(["prefill"]).prefill(tiny.params, graph.init_state(), prompt)

    def applied(target: Any) -> list[np.ndarray]:
        run = jax.jit(lambda *given: target.apply(*given, chunked=True).caches)
        start = jnp.zeros(1, jnp.int32)
        return jax.tree.leaves(run(params, prompt[None], graph.init_state().target, start))

    target, wanted = graph.pair.target, jax.tree.leaves(state.target)
    assert target.kernels == graph.plan.kernels == "native"
    for found, cache in zip(applied(target), wanted, strict=True):
        np.testing.assert_array_equal(found, cache)
    others = applied(target.clone(kernels="xla"))
    assert not all(map(np.array_equal, others, wanted))
