"""Source text of the running interpreter's standard library (PSF licence), split by file."""

import hashlib
import sysconfig
from pathlib import Path

SKIPPED = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "encodings")
)
HELD_OUT_SHARE = 12
LARGEST = 60_000
SMALLEST = 1_500


def modules() -> list[tuple[str, str]]:
    """(path below the library, text) of every usable source file, in order of the path's hash.

    Tests, tables and generated files are left out. The order spreads a prefix of the list over
    the library and is the same on every machine with this Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if SKIPPED.intersection(name.split("/")[:-1]) or name.startswith("pydoc_data"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if SMALLEST <= len(text) <= LARGEST and text.isascii():
            found.append((name, text))
    return sorted(found, key=lambda item: digest(item[0]))


def digest(name: str) -> bytes:
    """A stable hash of a file's name."""
    return hashlib.sha256(name.encode()).digest()


def training_sources(characters: int) -> list[str]:
    """Whole training files until `characters` are reached."""
    kept: list[str] = []
    for name, text in modules():
        if sum(map(len, kept)) >= characters:
            break
        if digest(name)[1] % HELD_OUT_SHARE:
            kept.append(text)
    return kept


def held_out_openings(count: int, characters: int = 360) -> list[str]:
    """`count` pieces of held-out files, cut at a line's end after about `characters`."""
    pieces: list[str] = []
    files = [text for name, text in modules() if digest(name)[1] % HELD_OUT_SHARE == 0]
    for text in (text for _ in range(count) for text in files):
        offset = (len(pieces) // len(files) + 1) * len(text) // 5
        start = text.find("\n", offset) + 1
        end = text.find("\n", start + characters) + 1
        if end and text[start:end] not in pieces:
            pieces.append(text[start:end])
        if len(pieces) == count:
            break
    return pieces
