"""Which parts of a grammar derive a finite text.

A part needs all or some of other parts. The parts with a finite derivation are the least fixed
point, found in time linear in the number of needs.
"""

from collections.abc import Iterable


class Derivations:
    """A graph of the parts of a grammar. A part that was not defined has no finite derivation."""

    def __init__(self) -> None:
        self._missing: list[int] = []  # by part, the number of parts that it still waits for
        self._users: list[list[int]] = []  # by part, the parts that need it
        self._finite: list[bool] = []

    def add(self) -> int:
        """Return a new part."""
        self._missing.append(1)
        self._users.append([])
        self._finite.append(False)
        return len(self._missing) - 1

    def define_all(self, part: int, needed: Iterable[int]) -> int:
        """Define a part that needs every one of these parts, and return it."""
        needed = list(needed)
        self._missing[part] = len(needed)
        for other in needed:
            self._users[other].append(part)
        return part

    def define_any(self, part: int, needed: Iterable[int]) -> int:
        """Define a part that needs one of these parts, and return it."""
        for other in needed:
            self._users[other].append(part)
        return part

    def finite(self) -> list[bool]:
        """Return, by part, whether it has a finite derivation; call it once, at the end."""
        waiting = [part for part, missing in enumerate(self._missing) if missing <= 0]
        for part in waiting:
            self._finite[part] = True
        while waiting:
            for user in self._users[waiting.pop()]:
                self._missing[user] -= 1
                if self._missing[user] <= 0 and not self._finite[user]:
                    self._finite[user] = True
                    waiting.append(user)
        return self._finite
