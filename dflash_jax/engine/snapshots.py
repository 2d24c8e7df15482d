"""Takes segments of prompts that were fed, and puts them into rows that need not feed them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import Program
from dflash_jax.decode.snapshot import Segment
from dflash_jax.engine.live import Live
from dflash_jax.engine.prefix_cache import Node, PrefixCache
from dflash_jax.errors import PlanError, SnapshotError
from dflash_jax.state import DecodeState

Programs = Mapping[str, Callable[..., Any]]


class Snapshots:
    """The rows' side of the prefix cache; it dispatches, and waits for nothing.

    Raises:
      PlanError: the plan's budget does not hold a single segment.
    """

    def __init__(self, plan: Plan, programs: Mapping[str, Program]):
        self._expected: Segment = programs["put_segment"].arguments[3]
        sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(self._expected)]
        self.cache = PrefixCache(
            chunk=plan.chunk,
            budget=plan.prefix_cache,
            segment_bytes=sum(sizes),
        )
        self._slots = plan.slots
        if not self.cache.capacity:
            raise PlanError(
                f"prefix_cache is {plan.prefix_cache} bytes, but one chunk of {plan.chunk} tokens"
                f" takes {sum(sizes)}; give at least that, or 0 to keep no prefixes"
            )

    def restore(self, run: Programs, state: DecodeState, row: int, live: Live) -> DecodeState:
        """The state after every kept chunk that continues what the row was fed was put into it."""
        cache, fresh = self.cache, live.fed == 0
        live.node = cache.root if fresh else live.node
        while node := self._next(live):
            try:
                self.check(node.segment, live.fed)
            except SnapshotError:
                cache.counters.refused += 1
                cache.drop(node)
                break
            state = run["put_segment"](state, np.int32(row), np.int32(live.fed), node.segment)
            live.node, live.fed = node, node.length
            live.stats.cached_tokens += cache.chunk
            cache.counters.hit_tokens += cache.chunk
        if fresh:
            cache.counters.hits += live.fed > 0
            cache.counters.misses += live.fed == 0
        return state

    def keep(self, run: Programs, state: DecodeState, row: int, live: Live, start: int) -> None:
        """Keeps the chunk that was just fed to a row, if it is a whole one and worth keeping."""
        chunk = live.request.prompt[start : live.fed]
        if live.node is None or live.node.length != start or len(chunk) < self.cache.chunk:
            return
        known = live.node.children.get(chunk)
        segment = known or run["take_segment"](state, np.int32(row), np.int32(start))
        live.node = self.cache.add(live.node, chunk, segment, position=live.fed)
        if live.node and not known:
            live.added.append(live.node)

    def settle(self, live: Live) -> None:
        """A request ended: what it added stays, unless its end makes one doubt its prompt."""
        for node in live.added:
            if node.kept and live.doubtful:
                self.cache.drop(node)
        live.added.clear()

    def _next(self, live: Live) -> Node | None:
        """The kept chunk that goes on where the row stands."""
        return None if live.uncached else self.cache.find(live.node, live.request.prompt, live.fed)

    def check(self, segment: Any, start: int) -> None:
        """Refuses a segment that is not made as this engine's are; nothing is ever clamped.

        Raises:
          SnapshotError: arrays are missing, of another shape or dtype, or past the last slot.
        """
        if start < 0 or start + self.cache.chunk > self._slots:
            raise SnapshotError(
                f"a segment of {self.cache.chunk} tokens at position {start} does not fit"
                f" {self._slots} slots"
            )
        if jax.tree.structure(segment) != jax.tree.structure(self._expected):
            raise SnapshotError("a segment lacks the arrays of a layer, or has others")
        pairs = zip(jax.tree.leaves(segment), jax.tree.leaves(self._expected), strict=True)
        for got, wanted in pairs:
            if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
                raise SnapshotError(
                    f"a segment holds {got.dtype}{list(got.shape)};"
                    f" expected {wanted.dtype}{list(wanted.shape)}"
                )
