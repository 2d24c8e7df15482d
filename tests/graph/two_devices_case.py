"""Run by test_two_devices in a process of its own, with two virtual devices: prints JSON."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import dflash_jax as dj
from dflash_jax import Plan, Recovery
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.two_devices import TwoDeviceState
from dflash_jax.testing import random_engine, tiny_drafter, tiny_gemma, tiny_hybrid, tiny_target

FAMILIES = {
    "dense": lambda: tiny_target(num_layers=2, windows=(12, None), vocab_size=96),
    "quick": lambda: tiny_target(num_layers=1, vocab_size=96),
    "hybrid": lambda: tiny_hybrid(num_layers=2, recurrent=(True, False)),
    "gemma": tiny_gemma,
}
PLACES = {"together": (0, 0), "apart": (0, 1), "swapped": (1, 0)}


def main() -> None:
    """Arguments: "shipped" or a family, then names of places."""
    family, *names = sys.argv[1:]
    found: dict[str, Any] = {"devices": len(jax.devices())}
    for name in names:
        sizes = {"rows": 2, "max_length": 96, "chunk": 16, "prefix_cache": 1 << 20}
        plan = Plan(**sizes, devices=PLACES[name], report_drafts=True)
        engine = dj.load(plan=plan) if family == "shipped" else random(family, plan)
        engine.measures_drafting = False
        vocab = min(96, engine.graph.config.vocab_size)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, vocab, 5 + 11 * i).tolist() for i in range(3)]
        cases = {"shipped": shipped, "quick": quick}.get(family, every)
        found[name] = cases(engine, prompts)
        if name != "together":
            places(engine, *PLACES[name])
    print(json.dumps(found))


def random(family: str, plan: Plan) -> Engine:
    target = FAMILIES[family]()
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    return random_engine(target, drafter, dataclasses.replace(plan, block=4))


def run(engine: Engine, prompts: Sequence[Any], **options: Any) -> list[Any]:
    """Tokens, then how many each round decided, how many drafts it verified, and rejected ones."""
    options = {"max_tokens": 14, "trace": True} | options
    results = engine.generate_many([*prompts, prompts[-1]], **options)
    lengths = [r.stats.acceptance_lengths for r in results]
    drafts = [r.stats.drafts_per_round for r in results]
    rejected = [[x.rejected for x in r.trace] for r in results]
    return [r.token_ids for r in results] + lengths + drafts + rejected


def quick(engine: Engine, prompts: list[list[int]]) -> dict[str, list[Any]]:
    """The greedy variant, drafted and plain, and a prefix found again."""
    greedy = run(engine, prompts)
    assert engine.generate(prompts[-1], max_tokens=2).stats.cached_tokens == 16
    plain = run(engine, prompts, speculative=False)
    narrow = run(engine, prompts, block_size=2)  # other rules for the drafter
    return {"greedy": greedy, "plain": plain[: len(prompts) + 1], "narrow": narrow}


def every(engine: Engine, prompts: list[list[int]]) -> dict[str, list[Any]]:
    """Every variant but that of structured output, and forced tokens."""
    found = quick(engine, prompts)
    stop = found["greedy"][0][3]
    return found | {
        "sampled": run(engine, prompts, temperature=1.0, seed=3),
        "shaped": run(engine, prompts, repetition_penalty=1.3, logit_bias={5: 2.0}),
        "min_tokens": run(
            engine,
            prompts,
            stop_token_ids=[stop],
            recovery=Recovery(min_tokens=8),
        ),
    }


def shipped(engine: Engine, prompts: list[list[int]]) -> dict[str, list[Any]]:
    """The trained pair, whose drafts are accepted; structured output."""
    texts = ["def add(a, b):\n", "The capital of France is", "import os\n"]
    shape = {"regex": r"[a-z ]{5,40}\."}
    return {
        "greedy": run(engine, texts, max_tokens=40),
        "plain": run(engine, texts, max_tokens=40, speculative=False)[: len(texts) + 1],
        "structured": run(engine, texts, max_tokens=40, structured=shape),
    }


def places(engine: Engine, target: int, drafter: int) -> None:
    """Everything is where the plan wants it, before and after steps."""

    def on(tree: object) -> set[int]:
        return {d.id for x in jax.tree.leaves(tree) for d in x.devices()}

    state = engine.core.runner.state
    assert isinstance(state, TwoDeviceState)
    assert on((engine.params["target"], state.target_state)) == {target}
    assert on((engine.params["drafter"], engine.params["shared"], state.drafter_state)) == {drafter}
    assert not state.target_state.drafter
    assert not state.drafter_state.target
    np.testing.assert_array_equal(state.target_state.position, state.drafter_state.position)
    np.testing.assert_array_equal(state.target_state.anchor, state.drafter_state.anchor)
    other = jax.tree.map(lambda x: 2 * np.asarray(x), engine.params["target"])
    for given in ({"target": other}, None):  # copies for the drafter follow
        engine.update_params(given or engine.params)
        shared = engine.params["shared"]
        for name in shared:
            jax.tree.map(np.testing.assert_array_equal, shared[name], other[name])
        assert on(engine.params["target"]) == {target}
        assert on((engine.params["drafter"], shared)) == {drafter}


if __name__ == "__main__":
    main()
