"""The loop: exact resumption, clean stops, refusal of foreign states."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import CheckpointError
from dflash_jax.train.loop import Run, Stopped, fit


def run(tmp_path, steps: int = 9) -> Run:
    return Run(tmp_path / "state.safetensors", steps, 4, "a run", "test")


def advance(state, step):
    noise = jax.random.normal(jax.random.key(step), (3,))
    return {"x": state["x"] * 0.9 + noise, "n": state["n"] + 1}, {"x": state["x"].mean()}


def start():
    return {"x": jnp.zeros(3), "n": jnp.int32(0)}


def test_a_signal_saves_and_the_same_call_goes_on(tmp_path):
    def interrupted(state, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(state, step)

    with pytest.raises(Stopped, match="step 6 of 9"):
        fit(run(tmp_path), start(), interrupted)
    resumed = fit(run(tmp_path), start(), advance)
    straight = fit(run(tmp_path / "other"), start(), advance)
    np.testing.assert_array_equal(resumed["x"], straight["x"])
    assert resumed["n"] == 9


def test_a_finished_run_is_not_run_again(tmp_path):
    fit(run(tmp_path), start(), advance)

    def never(state, step):
        raise AssertionError(step)

    assert fit(run(tmp_path), start(), never)["n"] == 9


def test_the_state_of_another_run_is_refused(tmp_path):
    fit(run(tmp_path), start(), advance)
    other = dataclasses.replace(run(tmp_path), identity="another run")
    with pytest.raises(CheckpointError, match="another preset or seed"):
        fit(other, start(), advance)
