"""The prefix cache as a tree: lookups, refusals, evictions and their order."""

import itertools
import sys
from typing import Any

import pytest

from dflash_jax.engine.prefix import cache as prefix_cache
from dflash_jax.engine.prefix.cache import Node, PrefixCache
from dflash_jax.errors import SnapshotError


def cache(capacity: int = 8, chunk: int = 1) -> PrefixCache:
    return PrefixCache(chunk=chunk, budget=capacity * 10 + 5, segment_bytes=10)


def keep(tree: PrefixCache, ids: list[int]) -> Node | None:
    """Add a whole prefix, chunk by chunk, as an engine does."""
    node: Node | None = tree.root
    for at in range(0, len(ids), tree.chunk):
        if node is not None:
            part = ids[at : at + tree.chunk]
            node = tree.add(node, part, tuple(ids[: at + tree.chunk]), position=at + len(part))
    return node


def found(tree: PrefixCache, prompt: list[int]) -> int:
    """Return the number of tokens of a prompt that need not be fed."""
    node, fed = tree.root, 0
    while child := tree.find(node, prompt, fed):
        node, fed = child, child.length
        assert child.segment == tuple(prompt[:fed])
    return fed


def test_the_longest_cached_prefix_is_found_on_the_chunk_grid() -> None:
    tree = cache(chunk=2)
    keep(tree, [1, 2, 3, 4])
    assert found(tree, [1, 2, 3, 4, 5]) == 4
    assert found(tree, [1, 2, 3, 5, 5]) == 2
    assert found(tree, [1, 3, 3, 4, 5]) == 0
    assert found(tree, [1]) == 0


def test_prefixes_of_one_salt_are_not_found_under_another() -> None:
    tree = cache(capacity=3, chunk=2)
    first = tree.add(tree.root_of("a"), [1, 2], "a", position=2)
    for salt, node in (("a", first), ("b", None), ("", None)):
        assert tree.find(tree.root_of(salt), [1, 2, 3], 0) is node
    tree.forget([1, 2], salt="b")
    assert tree.segments == 1
    tree.forget([1, 2], salt="a")
    assert tree.segments == 0
    tree.add(tree.root_of("a"), [1, 2], "a", position=2)
    tree.clear()
    assert tree.find(tree.root_of("a"), [1, 2, 3], 0) is None


def test_salts_without_prefixes_take_no_memory() -> None:
    tree = cache(capacity=3)
    kept = tree.add(tree.root_of("kept"), [1], "a", position=1)
    old = tree.root_of("old")
    for number in range(100):
        tree.root_of(str(number))
    assert len(tree._salted) <= 5
    assert tree.find(tree.root_of("kept"), [1, 2], 0) is kept
    assert tree.add(old, [1], "a", position=1) is None


def test_the_last_chunk_of_a_prompt_is_always_fed() -> None:
    """P26: the first output token comes from the last chunk, as without a cache."""
    tree = cache(chunk=2)
    keep(tree, [1, 2, 3, 4])
    assert found(tree, [1, 2, 3, 4]) == 2
    assert found(tree, [1, 2]) == 0


def test_p22_a_cached_prefix_longer_than_the_prompt_is_a_miss() -> None:
    tree = cache(chunk=4)
    keep(tree, [1, 2, 3, 4])
    assert found(tree, [1, 2, 3]) == 0


def test_p27_a_segment_from_another_position_than_the_end_of_its_key_is_refused() -> None:
    tree = cache(chunk=2)
    for ids, position in (([1, 2], 3), ([1, 2], 0), ([1], 1), ([1, 2, 3], 3)):
        with pytest.raises(SnapshotError, match=f"was taken at position {position}; expected 2"):
            tree.add(tree.root, ids, "segment", position=position)
    assert tree.segments == 0


def test_p28_prefixes_are_compared_by_ids_not_by_hash() -> None:
    forged = [-2, -2]
    assert hash((-1, -1)) == hash(tuple(forged))
    tree = cache(chunk=2)
    keep(tree, [-1, -1])
    assert found(tree, [*forged, 7]) == 0
    assert found(tree, [-1, -1, 7]) == 2


@pytest.mark.parametrize(
    ("kept", "victim"),
    [
        ([[9], [9, 1], [9, 1, 2]], 2),
        ([[9], [8], [7]], 0),
        ([[9], [9, 1], [9, 2]], 1),
    ],
    ids=["chain", "unrelated", "branches"],
)
def test_p33_the_oldest_leaf_is_evicted_first(kept: list[list[int]], victim: int) -> None:
    tree = cache(capacity=3)
    for ids in kept:
        keep(tree, ids)
    keep(tree, [5])
    for i, ids in enumerate(kept):
        assert found(tree, [*ids, 0]) == len(ids) - (i == victim)
    assert tree.counters.evictions == 1


def test_used_prefixes_are_evicted_last() -> None:
    tree = cache(capacity=2)
    keep(tree, [1])
    keep(tree, [2])
    assert found(tree, [1, 0]) == 1
    keep(tree, [3])
    assert found(tree, [1, 0]) == 1
    assert found(tree, [2, 0]) == 0


def test_bytes_stay_under_the_budget() -> None:
    tree = cache(capacity=5)
    for i in range(200):
        keep(tree, [i % 7, i % 3, i % 11, i])
        assert tree.bytes <= 55
    assert tree.counters.stored - tree.counters.evictions == tree.segments


def test_p23_a_dropped_prefix_takes_no_further_segments() -> None:
    tree = cache()
    node = keep(tree, [1, 2])
    assert node is not None
    tree.forget([1, 9])
    assert tree.segments == 0
    assert tree.add(node, [3], "late", position=3) is None
    assert found(tree, [1, 2, 3, 4]) == 0
    keep(tree, [1, 2])
    assert found(tree, [1, 2, 3, 4]) == 2


def test_a_chain_longer_than_the_budget_keeps_its_beginning() -> None:
    tree = cache(capacity=3)
    assert keep(tree, [1, 2, 3, 4, 5]) is None
    assert found(tree, [1, 2, 3, 4, 5]) == 3


def test_deep_prefixes_are_dropped_without_recursion() -> None:
    tree = cache(capacity=5000)
    keep(tree, [1] * 3000)
    tree.clear()
    assert tree.segments == tree.bytes == 0


def test_an_interrupt_at_any_line_leaves_a_consistent_cache() -> None:
    """Ctrl-C while a prefix is added and another evicted; then all prefixes are dropped."""
    for line in itertools.count(1):
        tree, left = cache(capacity=3), line
        nodes = [keep(tree, [9]), keep(tree, [8]), keep(tree, [8, 1])]

        def stop(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            left -= event == "line" and frame.f_code.co_filename == prefix_cache.__file__
            if not left:
                raise KeyboardInterrupt
            return stop

        before = sys.gettrace()
        try:
            sys.settrace(stop)
            keep(tree, [7, 7])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        for node in nodes:  # as requests without visible output do
            if node and node.kept:
                tree.drop(node)
        tree.clear()
        assert tree.segments == 0
        assert not any(node and node.kept for node in nodes)
        for i in range(5):
            keep(tree, [i, i])
        assert found(tree, [4, 4, 4]) == 2
        if left > 0:  # no line is left to interrupt
            assert line > 10
            return
