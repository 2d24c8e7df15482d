"""Source text of the running interpreter's standard library (PSF licence), split by file."""

import functools
import hashlib
import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SKIPPED = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "encodings")
)
HELD_OUT_SHARE = 12
LARGEST = 60_000
SMALLEST = 1_500
PLACES = 9  # a file is opened at every ninth part of it


@functools.cache
def modules() -> tuple[tuple[str, str], ...]:
    """Return the path and text of every usable source file, in the order of the path's hash.

    Tests, tables and generated files are left out. The order spreads a prefix of the list over
    the library and is the same on every machine with this Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if SKIPPED.intersection(name.split("/")[:-1]) or name.startswith("pydoc_data"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if SMALLEST <= len(text) <= LARGEST and text.isascii():
            files.append((name, text))
    return tuple(sorted(files, key=lambda file: digest(file[0])))


def digest(name: str) -> bytes:
    """Return a stable hash of a file's name."""
    return hashlib.sha256(name.encode()).digest()


def training_sources(characters: int) -> list[str]:
    """Return whole training files, of at least this many characters in all if there are so many."""
    kept: list[str] = []
    for name, text in modules():
        if sum(map(len, kept)) >= characters:
            break
        if digest(name)[1] % HELD_OUT_SHARE:
            kept.append(text)
    return kept


def held_out_openings(count: int, training: Sequence[str], *, characters: int = 360) -> list[str]:
    """Return pieces of held-out files, cut at a line's end after about `characters`.

    Pieces that training sources repeat, such as licences, are passed over.

    Args:
      count: number of pieces; fewer if there are not so many.
      training: sources of training text.
    """
    pieces: list[str] = []
    files = [text for name, text in modules() if digest(name)[1] % HELD_OUT_SHARE == 0]
    for place, text in itertools.product(range(1, PLACES), files):
        start = text.find("\n", place * len(text) // PLACES) + 1
        piece = text[start : text.find("\n", start + characters) + 1]
        if piece and piece not in pieces and not any(piece in source for source in training):
            pieces.append(piece)
        if len(pieces) == count:
            break
    return pieces
