"""Takes segments of prompts that were fed, and puts them into rows that need not feed them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.keys import ProgramKey, Step
from dflash_jax.compiler.programs import Program
from dflash_jax.decode.inputs import PutSegmentInputs, TakeSegmentInputs
from dflash_jax.decode.rows import Segment
from dflash_jax.engine.prefix.cache import Node, PrefixCache
from dflash_jax.engine.prefix.disk import PrefixDisk
from dflash_jax.engine.prefix.files import Kind
from dflash_jax.engine.sequence import Live
from dflash_jax.errors import PlanError, SnapshotError
from dflash_jax.plan import Plan
from dflash_jax.state import DecodeState

Ids = tuple[int, ...]
TAKE, PUT = ProgramKey(Step.TAKE_SEGMENT), ProgramKey(Step.PUT_SEGMENT)
Programs = Mapping[ProgramKey, Callable[..., Any]]


class Snapshots:
    """The rows' side of the prefix cache; it dispatches, and waits for nothing.

    Args:
      identity: makes a name for all that decides a segment's bits; asked if the plan keeps
        prefixes on disk.

    Raises:
      PlanError: a budget of the plan does not hold a single segment.
    """

    def __init__(
        self, plan: Plan, programs: Mapping[ProgramKey, Program], identity: Callable[[], str]
    ):
        self._expected: Segment = programs[PUT].arguments[3].segment
        sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(self._expected)]
        self.cache = PrefixCache(
            chunk=plan.chunk,
            budget=plan.prefix_cache,
            segment_bytes=sum(sizes),
        )
        self._slots = plan.slots
        for name, budget in (
            ("prefix_cache", plan.prefix_cache),
            ("prefix_disk", plan.prefix_disk),
        ):
            if budget < sum(sizes):
                raise PlanError(
                    f"{name} is {budget} bytes, but one chunk of {plan.chunk} tokens"
                    f" takes {sum(sizes)}; give at least that, or prefix_cache=0 to keep no"
                    " prefixes"
                )
        leaves = jax.tree.leaves(self._expected)
        kinds = [(str(np.dtype(x.dtype)), tuple(x.shape)) for x in leaves]
        self.disk = _open_disk(plan, identity, kinds) if plan.prefix_folder else None

    def prefetch(self, live: Live) -> None:
        """Begins to read from the disk what memory lacks of a prompt; its row waits for it."""
        if self.disk is not None and not live.uncached:
            known = self._held(live).length
            live.recall = self.disk.read(live.request.prompt, known, self.cache.capacity)

    def restore(self, run: Programs, state: DecodeState, row: int, live: Live) -> DecodeState:
        """The state after every kept chunk that continues what the row was fed was put into it."""
        if live.recall is not None:
            self._take_in(live, live.recall.result())
            live.recall = None
        cache, fresh = self.cache, live.fed == 0
        live.node = cache.root if fresh else live.node
        while node := self._next(live):
            try:
                self.check(node.segment, live.fed)
            except SnapshotError:
                cache.counters.refused += 1
                cache.drop(node)
                break
            inputs = PutSegmentInputs(np.int32(row), np.int32(live.fed), node.segment)
            state, _, _ = run[PUT](None, state, None, inputs)
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
        inputs = TakeSegmentInputs(np.int32(row), np.int32(start))
        segment = known or run[TAKE](None, state, None, inputs)[-1]
        live.node = self.cache.add(live.node, chunk, segment, position=live.fed)
        if live.node and not known:
            live.added.append(live.node)

    def forget(self, prompt: Ids, *, after: int = 0) -> None:
        """Drops what is kept of a prompt past some position, and all that continues it."""
        if not after:
            self.cache.forget(prompt)
        if self.disk is not None:
            self.disk.forget(prompt, after=after)

    def release(self, live: Live) -> None:
        """A request ended: what it added stays, unless its end makes one doubt its prompt."""
        added, prompt = [node for node in live.added if node.kept], live.request.prompt
        live.added.clear()
        if not added:
            return
        if not live.doubtful:
            if self.disk is not None:
                self.disk.keep(prompt, {x.length: x.segment for x in added[-1].path()})
            return
        for node in added:
            if node.kept:
                self.cache.drop(node)
        self.forget(prompt, after=added[0].length - self.cache.chunk)

    def _held(self, live: Live) -> Node:
        """How far memory holds a prompt."""
        node = self.cache.root
        while found := self.cache.find(node, live.request.prompt, node.length):
            node = found
        return node

    def _take_in(self, live: Live, found: list[tuple[int, list[np.ndarray]]]) -> None:
        """Puts what was read from the disk into memory, behind what is there."""
        prompt, node, expected = live.request.prompt, self._held(live), self._expected
        for start, arrays in found:
            if start < node.length:  # a neighbour has fed it meanwhile
                continue
            if start > node.length:  # what it continues was evicted meanwhile
                return
            try:
                segment = self._segment(arrays)
                self.check(segment, start)
            except SnapshotError:
                self.cache.counters.refused += 1
                self.forget(prompt, after=start)
                return
            placed = jax.tree.map(lambda x, e: jax.device_put(x, e.sharding), segment, expected)
            end = start + self.cache.chunk
            added = self.cache.add(node, prompt[start:end], placed, position=end)
            if added is None:
                return
            node = added

    def _segment(self, arrays: list[np.ndarray]) -> Any:
        structure = jax.tree.structure(self._expected)
        if len(arrays) != structure.num_leaves:
            raise SnapshotError("a segment lacks the arrays of a layer, or has others")
        return jax.tree.unflatten(structure, arrays)

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


def _open_disk(plan: Plan, identity: Callable[[], str], kinds: list[Kind]) -> PrefixDisk:
    if jax.process_count() > 1:
        raise PlanError(
            "prefix_folder was given, but hosts that read different prefixes would make different"
            " calls; leave it out where several processes share a mesh"
        )
    size = {"chunk": plan.chunk, "budget": plan.prefix_disk}
    folder = Path(plan.prefix_folder).expanduser().absolute()
    return PrefixDisk(folder, identity=identity(), kinds=kinds, **size)
