"""The prefix cache in memory: a tree of prompt chunks, compared by token ids.

A node is one chunk of token ids, and a path from the root a prefix that ends on the chunk grid. A
node holds the chunk's segment (`decode.snapshot`): target keys and values, recurrent states, the
drafter's context. Logits are not kept: the last chunk of a prompt is always fed, and decides the
first token. The least recently used leaf is evicted. Every salt has a tree of its own.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from dflash_jax.errors import SnapshotError
from dflash_jax.graph.state import Logprobs


@dataclasses.dataclass(eq=False)
class Node:
    """One chunk of a prefix."""

    ids: tuple[int, ...]  # token ids of the chunk
    parent: "Node | None"  # None for a root, which has no chunk
    segment: Any = None  # arrays of the chunk on the device, see `decode.snapshot`
    children: dict[tuple[int, ...], "Node"] = dataclasses.field(default_factory=dict)  # by ids
    length: int = 0  # number of tokens of the prefix that ends here
    kept: bool = True  # False once the node was dropped

    def path(self) -> "Iterator[Node]":
        """Yield the nodes of the prefix that ends here, the last one first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclasses.dataclass(eq=False)
class PromptCursor:
    """Progress of one prompt through prefill. Only the model runner moves it.

    A request that starts over gets a new cursor.
    """

    prompt: tuple[int, ...]
    salt: str = ""  # only prompts of the same salt share chunks
    use_cache: bool = True  # whether chunks may come from the prefix cache
    # Number of the prompt's tokens in the row's caches, restored ones included.
    num_computed: int = 0
    num_cached: int = 0  # number of tokens that were restored from the prefix cache
    node: Node | None = None  # of the last chunk; None where prefixes are not kept
    # Nodes that the request added to the prefix cache, in earlier attempts too.
    added: list[Node] = dataclasses.field(default_factory=list)
    loading: Future[list[Any]] | None = None  # segments that are being read from disk
    # Log-probabilities of the chunks, if the request asks for them.
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)

    def restarted(self, *, use_cache: bool) -> "PromptCursor":
        """Return a cursor at the beginning of the same prompt."""
        return PromptCursor(
            self.prompt, self.salt, use_cache=use_cache, added=self.added, loading=self.loading
        )


@dataclasses.dataclass
class CacheCounters:
    """Numbers of events of a prefix cache so far."""

    hits: int = 0  # requests that found a part of their prompt
    misses: int = 0  # requests that found nothing of their prompt
    hit_tokens: int = 0  # tokens of prompts that were found
    stored: int = 0  # segments that were added
    evictions: int = 0  # segments that were evicted
    refused: int = 0  # segments that did not fit the state


class PrefixCache:
    """Segments of prompt prefixes in device memory.

    Args:
      chunk: number of tokens of a segment.
      budget: most bytes of all segments together.
      segment_bytes: bytes of one segment.
    """

    def __init__(self, *, chunk: int, budget: int, segment_bytes: int):
        self.chunk = chunk
        self.segment_bytes = segment_bytes
        self.capacity = budget // segment_bytes
        self.counters = CacheCounters()
        self.root = Node((), None)  # of the tree without a salt
        self._salted: dict[str, Node] = {}  # roots of the other trees, by salt
        # All nodes that have a segment, the least recently used first.
        self._recent: collections.OrderedDict[Node, None] = collections.OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes of all segments held."""
        return len(self._recent) * self.segment_bytes

    @property
    def segments(self) -> int:
        """Number of segments held."""
        return len(self._recent)

    def root_of(self, salt: str) -> Node:
        """Return the root of the tree of a salt; an empty salt has the tree without one."""
        if not salt:
            return self.root
        if salt not in self._salted:
            if len(self._salted) > self.capacity:  # some of the trees have no segment
                self._drop_empty_trees()
            self._salted[salt] = Node((), None)
        return self._salted[salt]

    def find(self, node: Node | None, prompt: Sequence[int], start: int) -> Node | None:
        """Return the node of the prompt's next chunk after `node`, and mark it as used.

        Return None if the chunk is not cached, or if no token of the prompt would be left to feed.

        Args:
          start: index of the chunk's first token in the prompt.
        """
        end = start + self.chunk
        if node is None or not node.kept or end >= len(prompt) or start != node.length:
            return None
        child = node.children.get(tuple(prompt[start:end]))
        if child is not None:
            self._touch(child)
        return child

    def add(self, node: Node, ids: Sequence[int], segment: Any, *, position: int) -> Node | None:
        """Add the segment of the chunk `ids` after `node`; return its node, or None without room.

        Raises:
          SnapshotError: the row's position is not the end of the prefix.
        """
        ids = tuple(ids)
        end = node.length + self.chunk
        if position != end or len(ids) != self.chunk:
            raise SnapshotError(
                f"a segment of {len(ids)} tokens after {node.length} was taken at position"
                f" {position}; expected {self.chunk} tokens and position {end}: this is a defect,"
                " please report it"
            )
        if not node.kept:
            return None
        if ids not in node.children:
            while len(self._recent) >= self.capacity:
                if not self._evict(but=node):
                    return None
            child = Node(ids, node, segment, length=position)
            node.children[ids] = child
            self.counters.stored += 1
            self._recent[child] = None
        self._touch(node.children[ids])
        return node.children[ids]

    def forget(self, prompt: Sequence[int], *, salt: str = "") -> None:
        """Remove all prefixes of a prompt, and everything that continues them."""
        first = self.root_of(salt).children.get(tuple(prompt[: self.chunk]))
        if first is not None:
            self.drop(first)

    def drop(self, node: Node) -> None:
        """Remove a node and everything that continues it."""
        if node.parent is not None:
            node.parent.children.pop(node.ids, None)  # gone if an earlier drop was interrupted
        waiting = [node]
        while waiting:
            dropped = waiting.pop()
            waiting += dropped.children.values()
            dropped.kept = False
            dropped.segment = None
            del self._recent[dropped]

    def clear(self) -> None:
        """Remove everything, including the remains of an interrupted call."""
        for node in self._recent:
            node.kept = False
            node.segment = None
        self._recent.clear()
        for root in (self.root, *self._salted.values()):
            root.children.clear()

    def _drop_empty_trees(self) -> None:
        """Remove the trees of salts that have no segment."""
        for salt, root in list(self._salted.items()):
            if not root.children:
                root.kept = False
                del self._salted[salt]

    def _touch(self, node: Node) -> None:
        """Mark all chunks of a prefix as used, the last one first, so that it is evicted first."""
        for part in node.path():
            self._recent.move_to_end(part)

    def _evict(self, *, but: Node) -> bool:
        """Remove the least recently used leaf; return False if there is none."""
        for node in self._recent:
            if not node.children and node is not but:
                self.drop(node)
                self.counters.evictions += 1
                return True
        return False
