"""Split attention against dense masked attention, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dflash_jax.trainer import blocks
from dflash_jax.trainer.blocks import split_attention

ROWS, COUNT, WIDTH, LENGTH, KV, GROUPS, HEAD = 2, 3, 4, 12, 2, 2, 8


def tensors(seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 5)
    block = (ROWS, COUNT, WIDTH, KV)
    context = (ROWS, LENGTH, KV, HEAD)
    return (
        jax.random.normal(keys[0], (*block, GROUPS, HEAD)),
        jax.random.normal(keys[1], context),
        jax.random.normal(keys[2], context),
        jax.random.normal(keys[3], (*block, HEAD)),
        jax.random.normal(keys[4], (*block, HEAD)),
    )


def dense_mask(anchors: np.ndarray, causal: bool, window: int | None) -> np.ndarray:
    """[B, N*T, S+N*T], written out one pair at a time."""
    total = COUNT * WIDTH
    seen = np.zeros((ROWS, total, LENGTH + total), bool)
    for b, n, t in np.ndindex(ROWS, COUNT, WIDTH):
        query = anchors[b, n] + t
        for s in range(LENGTH):
            near = window is None or query - s < window
            seen[b, n * WIDTH + t, s] = s < anchors[b, n] and near
        for u in range(WIDTH):
            near = window is None or abs(t - u) < window
            seen[b, n * WIDTH + t, LENGTH + n * WIDTH + u] = (not causal or u <= t) and near
    return seen


def dense(q, ck, cv, bk, bv, seen):
    total = COUNT * WIDTH
    k = jnp.concatenate([ck, bk.reshape(ROWS, total, KV, HEAD)], axis=1)
    v = jnp.concatenate([cv, bv.reshape(ROWS, total, KV, HEAD)], axis=1)
    q = q.reshape(ROWS, total, KV, GROUPS, HEAD)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k) * HEAD**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgqs,bskh->bqkgh", weights, v)
    return out.reshape(ROWS, COUNT, WIDTH, KV * GROUPS * HEAD)


WHOLE, CHUNKED = 10_000, 300


@pytest.mark.parametrize(
    ("causal", "window", "limit"),
    [(False, None, WHOLE), (False, None, CHUNKED), (True, 3, CHUNKED), (False, 3, WHOLE)],
)
def test_split_equals_dense_in_values_and_gradients(causal, window, limit, monkeypatch):
    anchors = np.asarray([[0, 3, 4], [2, 9, 11]])
    seen = dense_mask(anchors, causal, window)
    given = tensors(0)

    def split(q, ck, cv, bk, bv):
        return split_attention(
            q, (ck, cv), (bk, bv), jnp.asarray(anchors), causal=causal, window=window
        )

    def slopes(function):
        @jax.jit
        def run(*tensors):
            def loss(*tensors):
                out = function(*tensors)
                return (jnp.sin(out) ** 2).sum(), out

            return jax.grad(loss, argnums=range(5), has_aux=True)(*tensors)

        return run(*given)

    def reference(*tensors):
        return dense(*tensors, seen)

    expected = jax.tree.leaves(slopes(reference))
    monkeypatch.setattr(blocks, "SCORE_ELEMENTS", limit)
    for ours, theirs in zip(jax.tree.leaves(slopes(split)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


FORMS = [(False, None), (True, None), (False, 2), (True, 3)]  # causal, window
programs = {
    (causal, window): jax.jit(
        lambda q, ck, cv, bk, bv, at, form=(causal, window): split_attention(
            q, (ck, cv), (bk, bv), at, causal=form[0], window=form[1]
        )
    )
    for causal, window in FORMS
}
oracle = jax.jit(dense)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    form=st.sampled_from(FORMS),
    anchors=arrays.arrays(np.int32, (ROWS, COUNT), elements=st.integers(0, LENGTH - 1)),
    seed=st.integers(0, 99),
)
def test_split_equals_dense_for_any_anchors(form, anchors, seed):
    given = tensors(seed)
    expected = oracle(*given, dense_mask(anchors, *form))
    np.testing.assert_allclose(programs[form](*given, jnp.asarray(anchors)), expected, atol=1e-5)
