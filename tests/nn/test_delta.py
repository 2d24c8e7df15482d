"""The two forms of the gated delta rule against each other and against plain NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.graph.build import jit
from dflash_jax.kernels.caches import RecurrentCache
from dflash_jax.nn.delta import (
    DeltaInputs,
    DeltaUpdate,
    by_chunk,
    by_token,
    causal_conv,
)

CLOSE = {"atol": 5e-5, "rtol": 2e-5}
ROWS, KEY_HEADS, HEADS, KEY, VALUE, CHANNELS, KEPT = 3, 2, 4, 8, 6, 5, 3


def rule(tokens: int, seed: int = 0) -> tuple[RecurrentCache, DeltaInputs, jax.Array, jax.Array]:
    """Return a cache, inputs of the rule, its keys per key head, and convolution inputs."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    k = rng.standard_normal((ROWS, tokens, KEY_HEADS, KEY), np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    each = (ROWS, tokens, HEADS)
    g = -rng.exponential(rng.choice([0.01, 3.0], each))
    x = DeltaInputs(
        q=normal(*each, KEY),
        k=jnp.asarray(np.repeat(k, HEADS // KEY_HEADS, axis=2)),
        v=normal(*each, VALUE),
        g=jnp.asarray(g, jnp.float32),
        beta=jnp.asarray(rng.uniform(0, 1, each), jnp.float32),
    )
    cache = RecurrentCache(
        state=normal(ROWS, HEADS, KEY, VALUE), inputs=normal(ROWS, KEPT, CHANNELS)
    )
    return cache, x, jnp.asarray(k), normal(ROWS, KEPT + tokens, CHANNELS)


def by_hand(state: np.ndarray, x: DeltaInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and states in float64, computed by token, row and head."""
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v, x.g, x.beta))
    out, states = np.zeros(v.shape), np.zeros((v.shape[1], *state.shape))
    for b in range(ROWS):
        for h in range(HEADS):
            s = np.asarray(state[b, h], np.float64)
            for t in range(v.shape[1]):
                s = np.exp(g[b, t, h]) * s
                d = beta[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h])
                s = s + np.outer(k[b, t, h], d)
                out[b, t, h], states[t, b, h] = s.T @ q[b, t, h], s
    return out, states


@pytest.mark.parametrize("tokens", [1, 7, 64, 512])
def test_both_forms_and_both_commits_are_the_recurrence(tokens: int) -> None:
    cache, x, k, inputs = rule(tokens)
    wanted, states = by_hand(np.asarray(cache.state), x)
    n = np.array([tokens, (tokens + 1) // 2, 0], np.int32)
    kept = jnp.asarray(n)

    @jit
    def both(cache: RecurrentCache, x: DeltaInputs) -> Any:
        found = []
        for form in (by_token, by_chunk):
            o, d = form(cache.state, x)
            update = DeltaUpdate(cache, inputs, k, d, x.g, chunked=form is by_chunk)
            found.append((o, update.commit(kept)))
        return found

    for out, after in both(cache, x):
        np.testing.assert_allclose(out, wanted, **CLOSE)
        for row in (0, 1):
            np.testing.assert_allclose(after.state[row], states[n[row] - 1, row], **CLOSE)
            window = inputs[row, n[row] : n[row] + KEPT]
            np.testing.assert_array_equal(after.inputs[row], window)
        np.testing.assert_array_equal(after.state[2], cache.state[2])  # n = 0
        np.testing.assert_array_equal(after.inputs[2], inputs[2, :KEPT])


def test_tokens_past_n_never_reach_the_state_even_if_not_finite() -> None:
    cache, x, k, inputs = rule(70)
    n = np.array([66, 3, 1], np.int32)
    late = jnp.arange(70)[None, :, None] >= n[:, None, None]

    def spoiled(a: jax.Array, value: float) -> jax.Array:
        return jnp.where(late.reshape(*late.shape[:2], *(1,) * (a.ndim - 2)), value, a)

    @jit
    def commits(x: DeltaInputs, k: jax.Array) -> list[RecurrentCache]:
        factors = (form(cache.state, x)[1] for form in (by_token, by_chunk))
        return [
            DeltaUpdate(cache, inputs, k, d, x.g, chunked=bool(i)).commit(jnp.asarray(n))
            for i, d in enumerate(factors)
        ]

    clean = commits(x, k)
    for value in (0.5, np.nan):
        junk = jax.tree.map(lambda a, value=value: spoiled(a, value), x)
        for ours, theirs in zip(commits(junk, spoiled(k, value)), clean, strict=True):
            np.testing.assert_array_equal(ours.state, theirs.state)


@pytest.mark.parametrize("form", [by_token, by_chunk])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_non_finite_token_does_not_affect_earlier_tokens(form: Any, part: str) -> None:
    """Such as a rejected draft, or the padding of a chunk."""
    cache, x, _, _ = rule(70, seed=6)
    wanted, run = by_hand(np.asarray(cache.state), x)[0], jit(form)
    for place, value in ((3, np.nan), (66, np.inf)):
        broken = np.array(getattr(x, part))
        broken[:, place] = value
        out, d = run(cache.state, dataclasses.replace(x, **{part: jnp.asarray(broken)}))
        np.testing.assert_allclose(out[:, :place], wanted[:, :place], **CLOSE)
        assert np.isfinite(d[:, :place]).all()
        assert not np.isfinite(out[:, place]).any()
        later = np.isfinite(out[:, place + 1 :])
        assert later.all() if part == "q" else not later.any()


def test_outputs_and_states_have_the_same_bits_whatever_the_cuts() -> None:
    cache, x, k, inputs = rule(24)

    @jit
    def block(state: jax.Array, x: DeltaInputs, k: jax.Array, n: jax.Array) -> Any:
        out, d = by_token(state, x)
        before = RecurrentCache(state=state, inputs=cache.inputs)
        update = DeltaUpdate(before, inputs[:, : KEPT + 8], k, d, x.g, chunked=False)
        return out, update.commit(n).state

    def run(cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        state, at, outs = cache.state, 0, []
        for n in cuts:
            here = slice(at, at + 8)
            part = jax.tree.map(lambda a, here=here: np.asarray(a)[:, here], x)
            out, state = block(state, part, k[:, here], np.full(ROWS, n, np.int32))
            outs.append(np.asarray(out)[:, :n])
            at += n
        return np.concatenate(outs, axis=1), np.asarray(state)

    whole = run([8, 8])
    for cuts in ([1] * 16, [3, 5, 1, 7], [8, 1, 2, 5], [2] * 8):
        for ours, theirs in zip(run(cuts), whole, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_convolution_sees_its_own_channel_and_the_past_only() -> None:
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((2, 3 + 6, 4)).astype(np.float32)
    kernel = rng.standard_normal((4, 4)).astype(np.float32)
    out = np.asarray(causal_conv(jnp.asarray(inputs), jnp.asarray(kernel)))
    for t in range(6):
        total = (inputs[:, t : t + 4] * kernel[None]).sum(axis=1)
        np.testing.assert_allclose(out[:, t], total, atol=1e-6)
