"""Texts that equal, or nearly equal, an earlier text."""

import enum
import hashlib
import re
from collections.abc import Sequence

THRESHOLD = 0.7  # Jaccard similarity of word pairs from which texts are nearly equal


class Likeness(enum.Enum):
    """How a text resembles an earlier one."""

    EQUAL = "equal to an earlier one"
    NEAR = "nearly equal to an earlier one"


class DuplicateFilter:
    """Finds texts that resemble an earlier text.

    Texts are compared without case, punctuation and spacing. The search for similar texts is
    complete: two sets with a Jaccard similarity of at least t share one of the first
    n - ceil(t n) + 1 elements in any common order (prefix filtering: Chaudhuri et al. 2006), so
    only those are indexed.

    Args:
      texts: earlier texts.
      threshold: Jaccard similarity from which texts are nearly equal.
    """

    def __init__(self, texts: Sequence[str] = (), threshold: float = THRESHOLD):
        self._threshold = threshold
        self._seen: set[tuple[str, ...]] = set()
        self._pairs: list[frozenset[bytes]] = []
        self._by_pair: dict[bytes, list[int]] = {}
        for text in texts:
            self.add(text)

    def find(self, text: str) -> Likeness | None:
        """Return how a text resembles an earlier one, without remembering it."""
        words, pairs, indexed = self._parts(text)
        if words in self._seen:
            return Likeness.EQUAL
        candidates = {i for pair in indexed for i in self._by_pair.get(pair, ())}
        near = any(self._alike(pairs, self._pairs[i]) for i in candidates)
        return Likeness.NEAR if near else None

    def add(self, text: str) -> Likeness | None:
        """Return how a text resembles an earlier one; a text that does not is remembered."""
        likeness = self.find(text)
        words, pairs, indexed = self._parts(text)
        self._seen.add(words)
        if likeness is None:
            for pair in indexed:
                self._by_pair.setdefault(pair, []).append(len(self._pairs))
            self._pairs.append(pairs)
        return likeness

    def _parts(self, text: str) -> tuple[tuple[str, ...], frozenset[bytes], list[bytes]]:
        """Return a text's words, its word pairs, and those of them that are indexed."""
        words = tuple(re.findall(r"\w+", text.casefold())) or (text,)
        pairs = frozenset(map(_digest, zip(("", *words), words, strict=False)))
        return words, pairs, sorted(pairs)[: len(pairs) - self._least(len(pairs)) + 1]

    def _least(self, size: int) -> int:
        """Return the least number of elements that a set of a size shares with a similar one."""
        return -int(-self._threshold * size // 1)

    def _alike(self, one: frozenset[bytes], other: frozenset[bytes]) -> bool:
        common = len(one & other)
        return common >= self._threshold * (len(one) + len(other) - common)


def _digest(pair: tuple[str, str]) -> bytes:
    """Return a hash that is the same in every process, unlike Python's own."""
    return hashlib.blake2b("\0".join(pair).encode(errors="replace"), digest_size=8).digest()
