"""Engines do what they do whatever the user set in JAX for other work."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.engine.engine import Engine
from dflash_jax.graph import Graph
from dflash_jax.graph.build import compile_programs
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.programs import declare
from dflash_jax.testing import planned

SETTINGS: dict[str, Any] = {
    "jax_enable_x64": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_transfer_guard": "disallow",
}


@pytest.fixture
def disturbed() -> Iterator[None]:
    """The settings in every thread, a mesh in this one."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    with contextlib.ExitStack() as entered:
        for name, value in before.items():
            entered.callback(jax.config.update, name, value)
        mesh = jax.make_mesh((1,), ("x",))
        for name, value in SETTINGS.items():
            jax.config.update(name, value)
        entered.enter_context(jax.set_mesh(mesh))
        yield


def test_programs_are_the_same_under_any_settings(tiny: Engine, disturbed: None) -> None:
    plan = dataclasses.replace(tiny.plan, prefix_cache=1 << 20)
    made = declare(planned(tiny.graph.config, tiny.graph.drafter_config, plan))
    for key in made.keys() & tiny.core.runner.compiled.programs.keys():
        assert made[key].arguments == tiny.core.runner.compiled.programs[key].arguments
    compile_programs([made[ProgramKey(Step.CLEAR_ROWS)]])  # refused if it copied its state


def test_steps_are_made_under_any_settings(tiny: Engine, request: pytest.FixtureRequest) -> None:
    wanted = tiny.generate([1, 2, 3], max_tokens=9).token_ids
    request.getfixturevalue("disturbed")
    assert tiny.generate([1, 2, 3], max_tokens=9).token_ids == wanted


def test_weights_are_placed_under_any_settings(
    tiny: Engine, request: pytest.FixtureRequest
) -> None:
    params = jax.tree.map(np.asarray, tiny.params)
    request.getfixturevalue("disturbed")
    assert Engine(Graph(tiny.graph.pair, tiny.plan), params).params["target"]["embed"].shape


def test_a_ctrl_c_at_the_end_of_a_turn_lets_the_thread_trace_on(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jax.no_tracing

    class Stopped:
        def __enter__(self) -> None:
            real().__enter__()

        def __exit__(self, *_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(jax, "no_tracing", Stopped)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate([1, 2, 3], max_tokens=9)
    assert jax.jit(lambda x: x + 1)(1) == 2
    assert len(tiny.generate([1, 2, 3], max_tokens=9).token_ids) == 9
