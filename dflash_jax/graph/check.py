"""Bitwise checks of what losslessness needs of a target."""

import dataclasses
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

# A difference of so many units in the last place of the largest number counts as rounding, up to
# this share of it.
ROUNDINGS = 256
LARGEST = 0.02


@isolated_jax_config()
def check(pair: Pair, params: Params | None = None, *, seed: int = 0) -> list[str]:
    """Return the obligations of a target that do not hold, each as a sentence; [] if all hold.

    A sentence names the first layer or tap that differs, the token, the size of the difference, and
    whether rounding explains it, which breaks an obligation as well, but is mended otherwise.

    Random tokens are run in two rows, in blocks of four, in every way in which a decode step may
    run them, and hidden states are compared bit by bit. Then texts are decoded with and without the
    drafter. Takes seconds for a small config; bits may depend on sizes, so test those that you use.

    Args:
      pair: the modules; the drafter may be None.
      params: parameters by role, as for `Graph.place_params`; by default fresh ones.
      seed: seed of the tokens, and of fresh parameters.

    Raises:
      PlanError: the modules or parameters do not fit each other.
    """
    graph = Graph(pair, Plan(rows=2, block=4, chunk=4, max_length=64, steps_per_call=1))
    key = jax.random.key(seed)
    params = graph.init_params(key) if params is None else graph.place_params(params)
    problems = _Target(graph, params, seed).problems()
    if not problems and pair.drafter is not None:
        problems += _decoded(graph, params, seed)
    return problems


class _Target:
    """Forward passes of a target over blocks of four tokens."""

    def __init__(self, graph: Graph, params: Params, seed: int):
        self.graph = graph
        self.params = params
        self.width = graph.plan.block
        rows = graph.plan.rows
        rng = np.random.default_rng(seed)
        self.tokens, self.others = rng.integers(0, graph.config.vocab_size, (2, rows, 32), np.int32)
        self.empty = graph.init_state().target
        every = tuple(range(graph.config.num_layers + 1))
        # As steps run it, and with the output of every layer, to tell where a difference begins.
        self._run = jit(functools.partial(_forward, graph.pair, graph.pair.taps))
        self._run_all = jit(functools.partial(_forward, graph.pair, every))

    def problems(self) -> list[str]:
        """Return the obligations that do not hold."""
        width = self.width
        others = self.others
        whole = _Way([width] * 4)
        if not all(np.isfinite(x).all() for x in self.states(whole)):
            return ["the hidden states are not finite"]
        sentences = []

        def compare(way: _Way, problem: str, remedy: str, rows: Any = slice(None)) -> None:
            told = any(sentence.startswith(problem) for sentence in sentences)
            if not told and (place := self.difference(whole, way, rows)):
                sentences.append(f"{problem}: {place}; {remedy}")

        compare(whole, "two runs of the same tokens differ", "use no random numbers")
        for commits in ([1], [width - 1], [width, 2]):
            compare(
                _Way(commits, after=others),
                "a token's bits depend on later tokens of its block",
                "mask them",
            )
        compare(
            _Way([width, 0, width, width], after=others),
            "a token's bits depend on slots past the row's position, or on tokens that were not"
            " committed",
            "read slots through a mask, and return an update of recurrent states, whose commit of"
            " 0 tokens changes nothing",
        )
        cuts = [1, 2, 3, 1, 3, 1, 2, 3]
        compare(
            _Way(cuts),
            "a token's bits depend on where the block begins",
            "compute every place of a block alike; docs/graph.md says how, under Obligations",
        )
        if not sentences:
            compare(
                _Way(cuts, after=others),
                "a token's bits depend on tokens that were not committed",
                "mask them, and return an update of recurrent states",
            )
        mixed = np.stack([self.tokens[0], others[1]])
        compare(
            _Way([width] * 4, tokens=mixed),
            "a row's bits depend on the tokens of other rows",
            "use no sums over rows",
            rows=slice(0, 1),
        )
        if getattr(self.graph.pair.target, "width_invariant", False):
            compare(
                _Way([1] * 12, width=1),
                "a token's bits depend on the width of its call, although the target has"
                " width_invariant",
                "remove width_invariant",
            )
        return sentences

    def difference(self, way: "_Way", other: "_Way", rows: slice) -> str:
        """Return where and by how much states of one way differ from those of another, or ""."""
        first = self._first_difference(self._run, self.graph.pair.taps, (way, other), rows)
        if not first:
            return ""
        # With every layer as an output XLA may round otherwise, so that there is no difference.
        every = tuple(range(self.graph.config.num_layers + 1))
        return self._first_difference(self._run_all, every, (way, other), rows) or first

    def _first_difference(
        self, run: Any, taps: tuple[int, ...], ways: tuple["_Way", "_Way"], rows: slice
    ) -> str:
        one, other = (self.states(way, run) for way in ways)
        names = (*map(_layer, taps), "the hidden state")
        for name, x, y in zip(names, one, other, strict=True):
            x = x[rows, : y.shape[1]]
            if not np.array_equal(x, y[rows]):
                return _described(name, x, y[rows])
        return ""

    def states(self, way: "_Way", run: Any = None) -> list[np.ndarray]:
        """Return taps and hidden states [B, sum(commits), D] of tokens that are run in blocks."""
        tokens = self.tokens if way.tokens is None else way.tokens
        width = way.width or self.width
        caches = self.empty
        position = 0
        kept = []
        for count in way.commits:
            block = tokens[:, position : position + width].copy()
            if way.after is not None:
                block[:, count:] = way.after[:, position + count : position + width]
            start = np.full(len(tokens), position, np.int32)
            committed = np.full(len(tokens), count, np.int32)
            states, caches = (run or self._run)(self.params, block, caches, start, committed)
            kept.append([np.asarray(x)[:, :count] for x in states])
            position += count
        return [np.concatenate(parts, axis=1) for parts in zip(*kept, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to run tokens in blocks.

    Attributes:
      commits: how many tokens of each block are kept.
      width: tokens of a block; 0 for the plan's.
      tokens: other tokens than the target's own.
      after: what follows the kept tokens in a block; by default the tokens themselves.
    """

    commits: list[int]
    width: int = 0
    tokens: np.ndarray | None = None
    after: np.ndarray | None = None


def _layer(tap: int) -> str:
    return f"the output of layer {tap - 1}" if tap else "the input of layer 0"


def _described(name: str, x: np.ndarray, y: np.ndarray) -> str:
    """Return where states [B, T, D] differ, by how much, and whether rounding explains it."""
    exact = np.float64
    distance = np.abs(x.astype(exact) - y.astype(exact))
    row, token, _ = np.argwhere(distance > 0)[0]
    size = distance.max()
    scale = np.abs(x.astype(exact)).max()
    eps = float(jnp.finfo(x.dtype).eps)
    small = size <= min(ROUNDINGS * eps, LARGEST) * scale
    kind = "by rounding only" if small else "by more than rounding"
    return (
        f"{name} differs first at token {token} of row {row}, at most by {size:.1e} where numbers"
        f" reach {scale:.1e}, {kind}"
    )


def _forward(
    pair: Pair,
    taps: tuple[int, ...],
    params: Params,
    block: Any,
    caches: Any,
    start: Any,
    num_committed: Any,
) -> tuple[tuple[Any, ...], Any]:
    """Run a block behind the barriers of `steps.pair.forward`, and commit the first tokens."""
    block, start = jax.lax.optimization_barrier((block, start))
    out = pair.target_call(
        params, block, caches, start, taps=taps, taps_at=pair.options.taps_at, chunked=False
    )
    out = jax.lax.optimization_barrier(out)
    return (*out.taps, out.hidden), tuple(update.commit(num_committed) for update in out.caches)


def _decoded(graph: Graph, params: Params, seed: int) -> list[str]:
    """Return how drafted and plain outputs differ, or nothing."""
    programs = graph.compile()
    rules = graph.rules(stop=())
    prompts = np.random.default_rng(seed).integers(0, graph.config.vocab_size, (2, 6), np.int32)
    texts = []
    for step in (programs.plain, programs.speculative):
        state = graph.init_state()
        text = [[], []]
        out = None
        for row, prompt in enumerate(prompts):
            state, out = programs.prefill(params, state, prompt, row=row, rules=rules)
            text[row] += out.tokens[row]
        while out is None or not out.done.all():
            state, out = step(params, state, rules=rules)
            text = [old + new for old, new in zip(text, out.tokens, strict=True)]
        texts.append(text)
    return [] if texts[0] == texts[1] else ["drafted and plain decoding give different tokens"]
