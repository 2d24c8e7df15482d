"""Looks for stop strings in a text that arrives in pieces, and never gives what may become one."""

from collections.abc import Iterable, Sequence


class Stops:
    """Holds back what may become a stop string.

    Attributes:
      held: what was not given: it may become a stop string, or begins with the one that came.
      found: the stop string that was completed; nothing is given behind it.
    """

    def __init__(self, texts: Sequence[str] = ()):
        self._texts = tuple(texts)
        self.held = ""
        self.found: str | None = None

    def push(self, new: str) -> str:
        """The text that is now certain."""
        if not self._texts:
            return new
        if self.found is not None:
            return ""
        given = self._search(self.held + new, self._texts)
        if self.found is None:
            at = len(given) - max(overlap(given, s) for s in self._texts)
            given, self.held = given[:at], given[at:]
        return given

    def flush(self, markup: str = "") -> str:
        """What was held back, once nothing can continue it; later text begins anew.

        Args:
          markup: what follows, which is not shown; a stop string may be it, or end with it.
        """
        if self.found is not None:
            return ""
        length = len(self.held)
        texts = [s for s in self._texts if markup and s.endswith(markup)]
        return self._search(self.held + markup, texts)[:length]

    def _search(self, pending: str, texts: Iterable[str]) -> str:
        """The text up to the first of these stop strings, from which on all is held."""
        places = [(at, s) for s in texts if (at := pending.find(s)) >= 0]
        at, self.found = min(places) if places else (len(pending), None)
        self.held = pending[at:]
        return pending[:at]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that begins the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
