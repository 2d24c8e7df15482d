"""Prompt prefixes that need not be fed again: a tree of chunks, compared by their ids.

A node stands for one chunk of token ids after those of its parents, so a path from the root is
a prefix that ends on the chunk grid. It holds the chunk's segment (`decode.rows`): target
keys and values, recurrent states, the drafter's context. No logits are kept: the last chunk of
a prompt is always fed, so the first token comes from where it would come from anyway, and
nothing is ever fed twice.

The node evicted is the one longest unused that no other node continues. Standard library only;
segments are opaque here.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dflash_jax.errors import SnapshotError


@dataclasses.dataclass(eq=False)
class Node:
    """A chunk of a prefix."""

    ids: tuple[int, ...]
    parent: "Node | None"
    segment: Any = None
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)
    length: int = 0  # tokens of the prefix that ends here
    kept: bool = True  # False once dropped

    def path(self) -> "Iterator[Node]":
        """The chunks of the prefix that ends here, the last first."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclasses.dataclass
class Counters:
    """What happened so far."""

    hits: int = 0  # requests that found a part of their prompt
    misses: int = 0
    hit_tokens: int = 0
    stored: int = 0  # segments
    evictions: int = 0
    refused: int = 0  # segments that did not fit the state


class PrefixCache:
    """Segments under a budget of bytes.

    Args:
      chunk: tokens of a segment.
      budget: most bytes of all segments together.
      segment_bytes: bytes of one segment; all are alike.
    """

    def __init__(self, *, chunk: int, budget: int, segment_bytes: int):
        self.chunk, self.segment_bytes = chunk, segment_bytes
        self.capacity = budget // segment_bytes
        self.counters = Counters()
        self.root = Node((), None)
        self._recent: collections.OrderedDict[Node, None] = collections.OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes of all segments held."""
        return len(self._recent) * self.segment_bytes

    @property
    def segments(self) -> int:
        """Segments held."""
        return len(self._recent)

    def find(self, node: Node | None, prompt: Sequence[int], fed: int) -> Node | None:
        """The node that continues `node` by the prompt's next chunk, and marks it as used.

        None if it is not held, or if it would leave nothing of the prompt to feed.
        """
        end = fed + self.chunk
        if node is None or not node.kept or end >= len(prompt) or fed != node.length:
            return None
        found = node.children.get(tuple(prompt[fed:end]))
        if found:
            self._touch(found)
        return found

    def add(self, node: Node, ids: Sequence[int], segment: Any, *, position: int) -> Node | None:
        """Keeps the segment of the chunk `ids` after `node`; None if there is no room for it.

        Args:
          position: where the row stood when the segment was taken.

        Raises:
          SnapshotError: the position is not the end of the prefix (I9).
        """
        ids = tuple(ids)
        if position != node.length + self.chunk or len(ids) != self.chunk:
            raise SnapshotError(
                f"a segment of {len(ids)} tokens after {node.length} was taken at position"
                f" {position}; expected {self.chunk} tokens and position"
                f" {node.length + self.chunk}: this is a defect, please report it"
            )
        if not node.kept:
            return None
        if ids in node.children:
            self._touch(node.children[ids])
            return node.children[ids]
        while len(self._recent) >= self.capacity:
            if not self._evict(but=node):
                return None
        made = node.children[ids] = Node(ids, node, segment, length=position)
        self.counters.stored += 1
        self._recent[made] = None
        self._touch(made)
        return made

    def forget(self, prompt: Sequence[int]) -> None:
        """Drops every prefix of a prompt and all that continues one of them."""
        if found := self.root.children.get(tuple(prompt[: self.chunk])):
            self.drop(found)

    def drop(self, node: Node) -> None:
        """Drops a node and all that continues it."""
        if node.parent is not None:
            node.parent.children.pop(node.ids, None)  # gone if whoever dropped it was stopped
        left = [node]
        while left:
            last = left.pop()
            left += last.children.values()
            last.kept, last.segment = False, None
            del self._recent[last]

    def clear(self) -> None:
        """Drops everything, also what somebody who was stopped, as by Ctrl-C, left half done."""
        for node in self._recent:
            node.kept, node.segment = False, None
        self._recent.clear()
        self.root.children.clear()

    def _touch(self, node: Node) -> None:
        """Marks a prefix as used, its end first: it is the first of them to go."""
        for part in node.path():
            self._recent.move_to_end(part)

    def _evict(self, *, but: Node) -> bool:
        """Drops the node longest unused that nothing continues; False if there is none."""
        for node in self._recent:
            if not node.children and node is not but:
                self.drop(node)
                self.counters.evictions += 1
                return True
        return False
