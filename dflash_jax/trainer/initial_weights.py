"""Initial parameters of a drafter, random or taken from its target."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.families.dflash_net import DFlash
from dflash_jax.graph.build import jit
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.trainer.drafter import FIXED, anchored
from dflash_jax.trainer.rows import TokenRows

Params = dict[str, Any]
# The last factor of each kind's correction by earlier tokens: without it, a drafter drafts as v1.
CORRECTIONS = ("successor", "markov_w2", "correction_out")


def fresh(pair: Pair, seed: int) -> Params:
    """Return random parameters; corrections by earlier tokens start at zero, without effect."""
    params = jit(functools.partial(_random, pair.drafter))(jax.random.key(seed))
    for name in params.keys() & CORRECTIONS:
        params[name] = jnp.zeros_like(params[name])
    return params


def _random(drafter: Any, key: Key[Array, ""]) -> Params:
    c = drafter.config
    taps = [jnp.zeros((1, 1, c.hidden_size))] * len(c.target_layer_ids)
    blocks = jnp.zeros((1, 1, c.block_size, c.hidden_size))
    where = jnp.zeros((1, 1), jnp.int32)
    return drafter.init(key, taps, blocks, where, method=anchored)["params"]


def without_backbone(params: Params, config: DrafterConfig) -> tuple[Params, Params]:
    """Return the weights that a kind adds to those of a DFlash drafter, and the latter."""
    common = {f.name: getattr(config, f.name) for f in dataclasses.fields(DrafterConfig)}
    plain = DFlash(DrafterConfig(**common | {"kind": "dflash"}))
    shapes = jax.eval_shape(functools.partial(_random, plain), jax.random.key(0))
    return _split(params, shapes)


def _split(params: Params, names: Params) -> tuple[Params, Params]:
    """Return the parameters whose names are not in another tree, and the others."""
    outside: Params = {}
    inside: Params = {}
    for name, value in params.items():
        if name not in names:
            outside[name] = value
        elif isinstance(value, dict):
            own, common = _split(value, names[name])
            if own:
                outside[name] = own
            inside[name] = common
        else:
            inside[name] = value
    return outside, inside


def from_target(
    params: Params, target: Params, configs: tuple[TargetConfig, DrafterConfig]
) -> tuple[Params, str]:
    """Return the parameters with those of the target that fit, and a description of them.

    These are the final norm, and layers of the target, evenly spread. A random drafter returns
    little more than the mask token's embedding, to which a tied head gives a large logit: its loss
    begins far above log V.

    Args:
      params: fresh parameters of the drafter.
      target: parameters of the target.
      configs: those of target and drafter.
    """
    result = dict(params)
    norm = target.get("norm")
    if norm is not None and norm.shape == params["norm"].shape:
        result["norm"] = jnp.array(norm, jnp.float32)  # copied: training donates it
    copied: list[str] = []
    for i, source in enumerate(spread_layers(*configs)):
        layer = target.get(f"layers_{source}", {})
        name = f"layers_{i}"
        result[name], count = replaced(params[name], _as_drafter_layer(layer, configs[0]))
        if count:
            copied.append(str(source))
    if not copied:
        return result, "random layers: none of the target has a fitting shape"
    return result, f"what fits of the target's layers {', '.join(copied)}"


def spread_layers(target: TargetConfig, drafter: DrafterConfig) -> list[int]:
    """Return a target layer for each drafter layer, evenly spread, the last one last."""
    count = drafter.num_layers
    last = target.num_layers - 1
    return [last - (count - 1 - i) * target.num_layers // count for i in range(count)]


def _as_drafter_layer(layer: Params, config: TargetConfig) -> Params:
    """Return a layer of the target under the names and shapes of drafters."""
    attention = dict(layer.get("attention", {}))
    if (fused := attention.pop("qkv", None)) is not None:  # [D, K, G+2, H]
        groups = config.num_heads // config.num_kv_heads
        attention["q"] = fused[:, :, :groups].reshape(len(fused), -1)
        attention["kv"] = fused[:, :, groups:]
    return layer | {"attention": attention}


def replaced(params: Params, new_params: Params) -> tuple[Params, int]:
    """Return parameters with those of `new_params` that have the same name and shape.

    Returns:
      The parameters, and how many were replaced.
    """
    result: Params = {}
    count = 0
    for name, value in params.items():
        new = new_params.get(name)
        if isinstance(value, dict):
            result[name], more = replaced(value, new if isinstance(new, dict) else {})
            count += more
        elif getattr(new, "shape", None) == value.shape:
            result[name] = jnp.array(new, value.dtype)
            count += 1
        else:
            result[name] = value
    return result, count


def draft_tokens(
    rows: Sequence[TokenRows],
    size: int,
    target: TargetConfig,
    report: Callable[[str], None] = lambda line: None,
) -> np.ndarray:
    """Return the `size` most frequent tokens of the answers, in ascending order.

    End tokens are always among them. Of equally frequent tokens, lower ids are taken.
    """
    counts = np.zeros(target.vocab_size, np.int64)
    for part in rows:
        counts += np.bincount(part.tokens[part.wanted], minlength=target.vocab_size)
    order = counts.copy()
    order[list(target.eos_token_ids)] = counts.sum() + 1
    chosen = np.sort(np.argsort(-order, kind="stable")[:size])
    share = counts[chosen].sum() / max(counts.sum(), 1)
    report(f"draft vocabulary: {size:,} tokens are {share:.2%} of those in the answers")
    return chosen


def with_draft_vocabulary(
    params: Params, target: Params, tokens: np.ndarray, start: Params | None = None
) -> tuple[Params, Params]:
    """Return parameters with a head for some tokens, and the table of these tokens.

    The table is not trained: see `drafter.FIXED`.

    Args:
      start: parameters of a drafter with a vocabulary of its own. Its head's columns are kept for
        the tokens that are in both; the others' are the target's.
    """
    head = np.array(target["head"][:, tokens], np.float32)
    if start:
        before = np.asarray(start["d2t"]) + np.arange(len(start["d2t"]))
        _, new, old = np.intersect1d(tokens, before, return_indices=True)
        head[:, new] = np.asarray(start["head"], np.float32)[:, old]
    head = jnp.asarray(head)
    trained = {name: x for name, x in params.items() if name != "d2t"} | {"head": head}
    offsets = np.asarray(tokens - np.arange(len(tokens)), np.int32)
    return trained, {FIXED: {"d2t": jnp.asarray(offsets)}}
