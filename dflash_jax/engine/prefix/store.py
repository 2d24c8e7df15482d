"""Move prompt segments between the rows of the device state and the prefix cache."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.engine.prefix.cache import Node, PrefixCache, PromptCursor
from dflash_jax.engine.prefix.disk import Kinds, PrefixDisk
from dflash_jax.errors import PlanError, SnapshotError
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.programs import Program
from dflash_jax.graph.state import DecodeState
from dflash_jax.graph.steps.inputs import SegmentInputs
from dflash_jax.graph.steps.rows import Segment
from dflash_jax.plan import ResolvedPlan

Ids = tuple[int, ...]
TAKE = ProgramKey(Step.TAKE_SEGMENT)
PUT = ProgramKey(Step.PUT_SEGMENT)
Programs = Mapping[ProgramKey, Callable[..., Any]]


class PrefixStore:
    """Saves and restores the segments of prompts. Dispatches only; never waits for the device.

    Args:
      identity: names everything that determines a segment's bits, for prefixes on disk.
      hosts: processes that share the state.

    Raises:
      PlanError: a budget of the plan does not hold a single segment.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        programs: Mapping[ProgramKey, Program],
        identity: Callable[[], str],
        *,
        hosts: int = 1,
    ):
        self._expected: Segment = programs[PUT].arguments[3].segment
        self._slots = plan.slots
        budget = plan.prefix_cache
        leaves = jax.tree.leaves(self._expected)
        size = sum(x.size * x.dtype.itemsize for x in leaves)
        self.cache = PrefixCache(chunk=plan.chunk, budget=budget, segment_bytes=size)
        for name in ("prefix_cache", "prefix_disk"):
            if (budget := getattr(plan, name)) < size:
                raise PlanError(
                    f"{name} is {budget} bytes, but one chunk of {plan.chunk} tokens takes {size};"
                    " give at least that, or prefix_cache=0 to keep no prefixes"
                )
        kinds = [(str(np.dtype(x.dtype)), tuple(x.shape)) for x in leaves]
        self.disk = _open_disk(plan, identity, kinds, hosts) if plan.prefix_folder else None

    def prefetch(self, cursor: PromptCursor) -> None:
        """Begin to read chunks of a prompt that are on disk only; its row waits for them."""
        if self.disk is not None and cursor.use_cache:
            known = self._last_node(cursor).length
            cursor.loading = self.disk.read(
                cursor.prompt, known, self.cache.capacity, salt=cursor.salt
            )

    def restore(
        self, run: Programs, state: DecodeState, row: int, cursor: PromptCursor
    ) -> DecodeState:
        """Return the state with all cached chunks that continue the row's prompt."""
        if cursor.loading is not None:
            self._add_loaded(cursor, cursor.loading.result())
            cursor.loading = None
        cache = self.cache
        fresh = cursor.num_computed == 0
        cursor.node = cache.root_of(cursor.salt) if fresh else cursor.node
        while cursor.use_cache and (
            node := cache.find(cursor.node, cursor.prompt, cursor.num_computed)
        ):
            try:
                self.check(node.segment, cursor.num_computed)
            except SnapshotError:
                cache.counters.refused += 1
                cache.drop(node)
                break
            inputs = SegmentInputs(np.int32(row), np.int32(cursor.num_computed), node.segment)
            state, _, _ = run[PUT](None, state, None, inputs)
            cursor.node = node
            cursor.num_computed = node.length
            cursor.num_cached += cache.chunk
            cache.counters.hit_tokens += cache.chunk
        if fresh:
            cache.counters.hits += cursor.num_computed > 0
            cache.counters.misses += cursor.num_computed == 0
        return state

    def keep(
        self, run: Programs, state: DecodeState, row: int, cursor: PromptCursor, start: int
    ) -> None:
        """Add the whole chunks that were just fed to a row, from `start` on, to the cache."""
        size = self.cache.chunk
        for at in range(start, cursor.num_computed - size + 1, size):
            chunk = cursor.prompt[at : at + size]
            node = cursor.node
            if node is None or node.length != at:
                return
            segment = known = node.children.get(chunk)
            if known is None:
                inputs = SegmentInputs(np.int32(row), np.int32(at))
                _, _, segment = run[TAKE](None, state, None, inputs)
            cursor.node = self.cache.add(node, chunk, segment, position=at + size)
            if cursor.node and not known:
                cursor.added.append(cursor.node)

    def forget(self, prompt: Ids, *, salt: str = "", after: int = 0) -> None:
        """Remove the chunks of a prompt past a position, and all that continue them."""
        if not after:
            self.cache.forget(prompt, salt=salt)
        if self.disk is not None:
            self.disk.forget(prompt, after=after, salt=salt)

    def release(self, cursor: PromptCursor, *, not_cacheable: bool) -> None:
        """Write what an ended request added to disk; remove it if its end casts doubt on it."""
        added = [node for node in cursor.added if node.kept]
        cursor.added.clear()
        if added and not_cacheable:
            for node in added:
                if node.kept:
                    self.cache.drop(node)
            after = added[0].length - self.cache.chunk
            self.forget(cursor.prompt, salt=cursor.salt, after=after)
        elif added and self.disk is not None:
            segments = {x.length: x.segment for x in added[-1].path()}
            self.disk.keep(cursor.prompt, segments, salt=cursor.salt)

    def _last_node(self, cursor: PromptCursor) -> Node:
        """Return the node of the last chunk of a prompt that memory holds without a gap."""
        node = self.cache.root_of(cursor.salt)
        while child := self.cache.find(node, cursor.prompt, node.length):
            node = child
        return node

    def _add_loaded(self, cursor: PromptCursor, loaded: list[tuple[int, list[np.ndarray]]]) -> None:
        """Add segments that were read from disk to memory, continuing what is there."""
        node = self._last_node(cursor)
        expected = self._expected
        for start, arrays in loaded:
            if start < node.length:  # another row has fed it meanwhile
                continue
            if start > node.length:  # the chunk before it was evicted meanwhile
                return
            segment = jax.tree.unflatten(jax.tree.structure(expected), arrays)
            placed = jax.tree.map(lambda x, e: jax.device_put(x, e.sharding), segment, expected)
            end = start + self.cache.chunk
            added = self.cache.add(node, cursor.prompt[start:end], placed, position=end)
            if added is None:
                return
            node = added

    def check(self, segment: Any, start: int) -> None:
        """Refuse a segment that does not fit this engine; positions are never clamped.

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
        leaves = map(jax.tree.leaves, (segment, self._expected))
        for got, wanted in zip(*leaves, strict=True):
            if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
                raise SnapshotError(
                    f"a segment holds {got.dtype}{list(got.shape)};"
                    f" expected {wanted.dtype}{list(wanted.shape)}"
                )


def _open_disk(
    plan: ResolvedPlan, identity: Callable[[], str], kinds: Kinds, hosts: int
) -> PrefixDisk:
    if hosts > 1:
        raise PlanError(
            "prefix_folder was given, but hosts that read different prefixes would make different"
            " calls; leave it out where several processes share a mesh"
        )
    folder = Path(plan.prefix_folder).expanduser().absolute()
    budget = plan.prefix_disk
    return PrefixDisk(folder, chunk=plan.chunk, budget=budget, identity=identity(), kinds=kinds)
