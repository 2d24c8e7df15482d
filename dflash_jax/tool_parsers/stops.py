"""Search for stop strings in streamed text, which never emits part of a match.

The search is one Aho-Corasick automaton over all stop strings: its cost per character does not
depend on the number of strings.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Automaton:
    """An Aho-Corasick automaton. A state is a prefix of some string; state 0 is the empty one.

    Attributes:
      next: by state, the states of the prefixes that are one character longer.
      fail: by state, the state of its longest proper suffix that is also a prefix.
      depth: by state, the length of its prefix.
      longest: by state, the length of the longest string that the prefix ends with; 0 if none.
    """

    next: tuple[dict[str, int], ...]
    fail: tuple[int, ...]
    depth: tuple[int, ...]
    longest: tuple[int, ...]

    def step(self, state: int, character: str) -> int:
        """Return the state of the longest suffix, after one more character, that is a prefix."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


@functools.lru_cache(maxsize=64)
def automaton(texts: tuple[str, ...]) -> Automaton:
    """Return the automaton of these strings, none of which is empty."""
    following: list[dict[str, int]] = [{}]
    fail, depth, longest = [0], [0], [0]
    for text in texts:
        state = 0
        for character in text:
            if character not in following[state]:
                following[state][character] = len(following)
                following.append({})
                fail.append(0)
                depth.append(depth[state] + 1)
                longest.append(0)
            state = following[state][character]
        longest[state] = len(text)
    waiting = collections.deque(following[0].values())
    while waiting:  # breadth first, so that shorter suffixes are complete
        state = waiting.popleft()
        longest[state] = longest[state] or longest[fail[state]]
        for character, child in following[state].items():
            suffix = fail[state]
            while suffix and character not in following[suffix]:
                suffix = fail[suffix]
            fail[child] = following[suffix].get(character, 0)
            waiting.append(child)
    return Automaton(tuple(following), tuple(fail), tuple(depth), tuple(longest))


class Stops:
    """Searches for stop strings, and holds back text that may be the start of one.

    Attributes:
      held: text that was not returned: a possible start of a stop string, or from a complete one
        on.
      found: the stop string that was found; no later text is returned.
    """

    def __init__(self, texts: Sequence[str] = ()):
        self._texts = tuple(texts)
        self._state = 0  # of the automaton, after `held`
        self.held = ""
        self.found: str | None = None

    def push(self, new: str) -> str:
        """Return the text that can no longer become part of a stop string."""
        if not self._texts:
            return new
        if self.found is not None:
            return ""
        strings, state = automaton(self._texts), self._state
        pending = self.held + new
        start = length = -1  # of the match that starts first; the shorter of two that start there
        for end, character in enumerate(new, len(self.held) + 1):
            state = strings.step(state, character)
            if (size := strings.longest[state]) and (start < 0 or end - size < start):
                start, length = end - size, size
        self._state = state
        if start >= 0:
            self.found = pending[start : start + length]
            self.held = pending[start:]
            return pending[:start]
        certain = len(pending) - strings.depth[state]
        self.held = pending[certain:]
        return pending[:certain]

    def flush(self, markup: str = "") -> str:
        """Return the held text, since markup or the end follows; the search starts over.

        Args:
          markup: hidden text that follows; a stop string may end with it.
        """
        if self.found is not None:
            return ""
        held, pending, self._state = self.held, self.held + markup, 0
        texts = [s for s in self._texts if markup and s.endswith(markup)]
        matches = [(at, s) for s in texts if (at := pending.find(s)) >= 0]
        at, self.found = min(matches) if matches else (len(pending), None)
        self.held = pending[at:]
        return held[:at]


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
