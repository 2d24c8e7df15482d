"""Rotary embedding against its formulas, pair by pair."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import RopeConfig
from dflash_jax.families.configs import target_config
from dflash_jax.nn.attention import inverse_frequencies, rope_tables, rotate

DIM = 16
LLAMA3 = RopeConfig(
    theta=50000.0,
    kind="llama3",
    factor=8.0,
    original_length=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = RopeConfig(
    theta=150000.0,
    kind="yarn",
    factor=32.0,
    original_length=4096,
    truncate=False,
    attention_factor=0.1 * math.log(32) + 1,
)


def base(theta: float, m: int) -> float:
    return theta ** (-2 * m / DIM)


def test_default_frequencies_fall_geometrically() -> None:
    got = inverse_frequencies(RopeConfig(theta=1e6), DIM)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [base(1e6, m) for m in range(DIM // 2)], rtol=1e-6)


def test_linear_scaling_divides_every_frequency() -> None:
    got = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), DIM)
    np.testing.assert_allclose(got, [base(1e4, m) / 4 for m in range(DIM // 2)], rtol=1e-6)


def test_llama3_scaling_has_its_three_cases() -> None:
    cases = set()
    wanted = []
    for m in range(DIM // 2):
        frequency = base(LLAMA3.theta, m)
        wavelength = 2 * math.pi / frequency
        if wavelength < LLAMA3.original_length / LLAMA3.high_freq_factor:
            cases.add("kept")
            wanted.append(frequency)
        elif wavelength > LLAMA3.original_length / LLAMA3.low_freq_factor:
            cases.add("rescaled")
            wanted.append(frequency / LLAMA3.factor)
        else:
            cases.add("between")
            smooth = (LLAMA3.original_length / wavelength - 1) / (4 - 1)
            wanted.append(frequency * (smooth + (1 - smooth) / LLAMA3.factor))
    assert cases == {"kept", "rescaled", "between"}
    np.testing.assert_allclose(inverse_frequencies(LLAMA3, DIM), wanted, rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_by_a_ramp_over_the_pairs(truncate: bool) -> None:
    def pair(turns: float) -> float:
        turning = YARN.original_length / (turns * 2 * math.pi)
        return DIM * math.log(turning) / (2 * math.log(YARN.theta))

    low, high = pair(YARN.beta_fast), pair(YARN.beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    wanted = []
    for m in range(DIM // 2):
        ramp = min(max((m - low) / (high - low), 0), 1)
        frequency = base(YARN.theta, m)
        wanted.append(frequency * (1 - ramp) + frequency / YARN.factor * ramp)
    rope = RopeConfig(**YARN.__dict__ | {"truncate": truncate})
    np.testing.assert_allclose(inverse_frequencies(rope, DIM), wanted, rtol=1e-6)


def test_yarn_multiplies_cosine_and_sine_by_its_attention_factor() -> None:
    positions = jnp.array([[0, 5]])
    cos, sin = rope_tables(YARN, DIM, positions)
    angle = 5 * inverse_frequencies(YARN, DIM)
    assert math.isclose(YARN.attention_factor, 1.3466, abs_tol=1e-4)
    np.testing.assert_allclose(cos[0, 0], np.full(DIM // 2, 1.3466), rtol=1e-4)
    np.testing.assert_allclose(sin[0, 1], YARN.attention_factor * np.sin(angle), rtol=1e-5)


def test_angles_keep_float32_precision_at_far_positions() -> None:
    rope = RopeConfig(theta=1e4)
    cos, _ = rope_tables(rope, DIM, jnp.array([[100_003]]))
    assert cos.dtype == jnp.float32
    angle = np.float32(100_003) * inverse_frequencies(rope, DIM)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle.astype(np.float64)), atol=1e-5)


def test_pairs_half_a_head_apart_turn_together() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 3, DIM)).astype(np.float32)
    rope = RopeConfig(theta=100.0)
    positions = jnp.array([[4, 9]])
    out = rotate(jnp.asarray(x), *rope_tables(rope, DIM, positions), "xla")
    half = DIM // 2
    for t, position in enumerate((4, 9)):
        for m in range(half):
            c, s = (f(position * base(100.0, m)) for f in (math.cos, math.sin))
            a, b = x[0, t, :, m], x[0, t, :, m + half]
            np.testing.assert_allclose(out[0, t, :, m], a * c - b * s, atol=1e-5)
            np.testing.assert_allclose(out[0, t, :, m + half], b * c + a * s, atol=1e-5)


def test_scores_depend_on_distances_only() -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, DIM)), jnp.float32) for _ in range(2))

    def score(i: int, j: int) -> float:
        turned = [
            rotate(x, *rope_tables(LLAMA3, DIM, jnp.array([[p]])), "xla")
            for x, p in ((q, i), (k, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert math.isclose(score(7, 3), score(107, 103), abs_tol=1e-4)
    assert not math.isclose(score(7, 3), score(8, 3), abs_tol=1e-3)


def test_tables_are_rounded_to_the_dtype_of_what_they_turn() -> None:
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((1, 1, 1, DIM)), jnp.bfloat16)
    cos, sin = rope_tables(RopeConfig(), DIM, jnp.array([[3]]))
    out = rotate(x, cos, sin, "xla")
    c, s = (t[0, 0].astype(jnp.bfloat16) for t in (cos, sin))
    a, b = x[0, 0, 0, : DIM // 2], x[0, 0, 0, DIM // 2 :]
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[0, 0, 0], jnp.concatenate([a * c - b * s, b * c + a * s]))


ROPES = json.loads((Path(__file__).parent.parent / "oracle" / "ropes.json").read_text())


@pytest.mark.parametrize("case", ROPES, ids=range(len(ROPES)))
def test_every_kind_and_spelling_turns_as_transformers_turns(case: dict[str, Any]) -> None:
    """Made by transformers 5.15 from the same configs, for texts of the same length."""
    rope = target_config(case["config"]).rope.for_length(case["length"])
    np.testing.assert_allclose(inverse_frequencies(rope, 16), case["frequencies"], rtol=1e-6)
    assert np.isclose(rope.attention_factor, case["attention_factor"], rtol=1e-7)
