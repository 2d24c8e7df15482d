"""Which target layers a drafter reads: the two numberings, and when a file is ambiguous.

Raw: id i is the output of decoder layer i. Plus one: the same tensor is called i + 1 (the input
of the next layer). Ours is raw. The numbers alone cannot tell which was meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_jax.errors import CheckpointError, ConfigError

AUTO = "auto"
RAW = "zero-based"
PLUS_ONE = "one-based"
CHOICES = (AUTO, RAW, PLUS_ONE)

# Published raw ids. Found where plus-one ids belong, or one higher where raw ids belong, they
# mean that the file's writer probably mistook the convention.
PUBLISHED = frozenset(
    {
        (1, 9, 17, 25, 33),
        (1, 16, 31, 46, 61),
        (1, 8, 15, 22, 29),
        (1, 10, 19, 28, 37),
        (1, 12, 23, 34, 45),
        (1, 6, 11, 16, 21),
        (1, 6, 11, 17, 22, 27),
        (1, 12, 23, 35, 46, 57),
        (1, 6, 11, 16, 22, 27, 32, 37),
        (1, 7, 14, 20, 26, 32, 39, 45),
        (5, 19, 33, 47, 61),
        (1, 13, 25, 37, 49),
    }
)
MAX_TAPS = 64


@dataclass(frozen=True)
class Taps:
    """Raw tap ids, and how they were determined."""

    ids: tuple[int, ...]
    written: tuple[int, ...]
    source: str  # the key they were written under
    convention: str
    chosen: bool  # whether the user chose the numbering, instead of the rules of the dialect

    def line(self) -> str:
        """Return one line for a report."""
        how = "as chosen" if self.chosen else "as this key is defined"
        written = f"{self.source} {list(self.written)}"
        return f"taps: {list(self.ids)} = {written} read as {self.convention}, {how}"


def read_taps(
    written: Sequence[int], *, source: str, convention: str | None, choice: str, where: str
) -> Taps:
    """Return raw ids from the ids that a file stores under a key.

    Args:
      convention: the numbering that the key has by definition; None if writers disagree.
      choice: the user's choice of a numbering.

    Raises:
      CheckpointError: the file is ambiguous and `choice` is "auto"; the message has both readings.
      ConfigError: `choice` is unknown, or the ids are not layers of a target.
    """
    if choice not in CHOICES:
        raise ConfigError(f"layer numbering {choice!r} is not one of {', '.join(CHOICES)}")
    ids = tuple(written)
    if not 1 <= len(ids) <= MAX_TAPS or len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: {source} is {list(ids)}; expected 1 to {MAX_TAPS} layer ids")
    if choice == AUTO:
        reason = _doubt(ids, convention)
        if reason:
            raise CheckpointError(
                f"{where}: {source} is {list(ids)}, and {reason}. It means the outputs of layers"
                f" {list(ids)} ({RAW}) or of layers {[i - 1 for i in ids]} ({PLUS_ONE}). Find"
                f" the drafter's original config.json and choose --layer-ids {RAW} or {PLUS_ONE}"
            )
    meant = convention if choice == AUTO else choice
    raw = tuple(i - 1 for i in ids) if meant == PLUS_ONE else ids
    if min(raw) < 0:
        raise ConfigError(
            f"{where}: {source} {list(ids)} read as {meant} gives layer {min(raw)}; taps of the"
            " embedding are not supported"
        )
    return Taps(raw, ids, source, str(meant), choice != AUTO)


def _doubt(ids: tuple[int, ...], convention: str | None) -> str:
    if convention is None:
        return "writers of this key disagree"
    if convention == PLUS_ONE and ids in PUBLISHED:
        return f"these are the published ids of a drafter in the {RAW} numbering"
    if convention == RAW and tuple(i - 1 for i in ids) in PUBLISHED:
        return "these are the published ids of a drafter, each one higher"
    return ""
