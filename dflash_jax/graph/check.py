"""Bitwise checks of what losslessness needs of a target."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.graph.build import jit
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.steps.pair import Pair, Params
from dflash_jax.plan import Plan


@isolated_jax_config()
def check(pair: Pair, params: Params | None = None, *, seed: int = 0) -> list[str]:
    """Return the obligations of a target that do not hold, each as a sentence; [] if all hold.

    Random tokens are run in two rows, in blocks of four, in every way in which a decode step may
    run them, and hidden states are compared bit by bit. Then texts are decoded with and without the
    drafter. Takes seconds for a small config; bits may depend on sizes, so test those that you use.

    Args:
      pair: the modules; the drafter may be None.
      params: parameters by role, as for `Graph.place_params`; by default fresh ones.
      seed: of tokens and fresh parameters.

    Raises:
      PlanError: the modules or parameters do not fit each other.
    """
    graph = Graph(pair, Plan(rows=2, block=4, chunk=4, max_length=64, steps_per_call=1))
    key = jax.random.key(seed)
    params = graph.init_params(key) if params is None else graph.place_params(params)
    found = _Target(graph, params, seed).problems()
    if not found and pair.drafter is not None:
        found += _decoded(graph, params, seed)
    return found


class _Target:
    """Forward passes of a target over blocks of four tokens."""

    def __init__(self, graph: Graph, params: Params, seed: int):
        self.graph, self.params = graph, params
        self.width, rows = graph.plan.block, graph.plan.rows
        rng = np.random.default_rng(seed)
        self.tokens, self.others = rng.integers(0, graph.config.vocab_size, (2, rows, 32), np.int32)
        self.empty = graph.init_state().target
        self._run = jit(functools.partial(_forward, graph.pair))

    def problems(self) -> list[str]:
        """Return the obligations that do not hold."""
        width, tokens, others, found = self.width, self.tokens, self.others, []
        expected = self.hidden([width] * 4)
        if not np.isfinite(expected).all():
            return ["the hidden states are not finite"]

        def compare(hidden: np.ndarray, problem: str, rows: Any = slice(None)) -> None:
            if not np.array_equal(hidden[rows], expected[rows, : hidden.shape[1]]):
                found.append(problem)

        compare(self.hidden([width] * 4), "two runs of the same tokens differ")
        compare(
            self.hidden([1, 2, 3, 1, 3, 1, 2, 3], after=others),
            "a token's bits depend on later tokens of its block, on where the block begins, or on"
            " slots past the row's position; mask them, and return an update of recurrent states",
        )
        mixed = np.stack([tokens[0], others[1]])
        compare(
            self.hidden([width] * 4, tokens=mixed),
            "a row's bits depend on the tokens of other rows",
            rows=[0],
        )
        if getattr(self.graph.pair.target, "any_width", False):
            compare(
                self.hidden([1] * 12, width=1),
                "a token's bits depend on the width of its call, although the target has any_width",
            )
        return found

    def hidden(
        self,
        commits: list[int],
        *,
        width: int = 0,
        tokens: np.ndarray | None = None,
        after: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return hidden states [B, sum(commits), D] of tokens that are run in blocks.

        Args:
          commits: how many tokens of each block are kept.
          after: what follows the kept tokens in a block; by default the tokens themselves.
        """
        tokens, width = self.tokens if tokens is None else tokens, width or self.width
        caches, position, kept = self.empty, 0, []
        for count in commits:
            block = tokens[:, position : position + width].copy()
            if after is not None:
                block[:, count:] = after[:, position + count : position + width]
            start, committed = (np.full(len(tokens), n, np.int32) for n in (position, count))
            hidden, caches = self._run(self.params, block, caches, start, committed)
            kept.append(np.asarray(hidden)[:, :count])
            position += count
        return np.concatenate(kept, axis=1)


def _forward(
    pair: Pair, params: Params, block: Any, caches: Any, start: Any, num_committed: Any
) -> tuple[Any, Any]:
    where = {"taps": pair.taps, "taps_at": pair.taps_at, "chunked": False}
    out = pair.target_call(params, block, caches, start, **where)
    hidden = jnp.concatenate([out.hidden, *out.taps], axis=-1)
    return hidden, tuple(update.commit(num_committed) for update in out.caches)


def _decoded(graph: Graph, params: Params, seed: int) -> list[str]:
    """Return how drafted and plain outputs differ, or nothing."""
    programs, rules = graph.compile(), graph.rules(stop=())
    prompts = np.random.default_rng(seed).integers(0, graph.config.vocab_size, (2, 6), np.int32)
    texts = []
    for step in (programs.plain, programs.speculative):
        state, text, out = graph.init_state(), [[], []], None
        for row, prompt in enumerate(prompts):
            state, out = programs.prefill(params, state, prompt, row=row, rules=rules)
            text[row] += out.tokens[row]
        while out is None or not out.done.all():
            state, out = step(params, state, rules=rules)
            text = [old + new for old, new in zip(text, out.tokens, strict=True)]
        texts.append(text)
    return [] if texts[0] == texts[1] else ["drafted and plain decoding give different tokens"]
