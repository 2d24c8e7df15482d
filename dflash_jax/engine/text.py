"""Text of a growing output, cut before the first stop string."""

from collections.abc import Sequence

from dflash_jax.tokenizer import Tokenizer


class OutputText:
    """Turns ids into text; holds back what may become a stop string (C3: nothing retracted)."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()):
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        self.stopped_by: str | None = None  # the stop string that was completed
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now certain; sets `stopped` when a stop string is complete."""
        if self._decoder is None or self.stopped:
            return ""
        return self._give(self._decoder.push(ids), end=False)

    def finish(self) -> str:
        """What was held back, once no more ids come."""
        if self._decoder is None or self.stopped:
            return ""
        return self._give(self._decoder.flush(), end=True)

    def _give(self, new: str, *, end: bool) -> str:
        pending = self._held + new
        found = [(at, s) for s in self._stop if (at := pending.find(s)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.stopped, pending, keep = True, pending[:at], 0
        else:
            keep = 0 if end else max((_overlap(pending, s) for s in self._stop), default=0)
        given = pending[: len(pending) - keep]
        self._held = pending[len(given) :]
        self.text += given
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
