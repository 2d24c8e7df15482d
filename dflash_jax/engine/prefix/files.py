"""Files of the prefix cache: written once, and read without trusting their contents."""

import contextlib
import itertools
import json
import math
import os
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = list[np.ndarray]  # the leaves of a segment
Kind = tuple[str, tuple[int, ...]]  # dtype and shape of an array
ABOUT_BYTES = 2**20  # more than what describes a segment of any model takes, without its token ids
BYTES_PER_ID = 24  # digits, comma and space of a token id in JSON
# Opening a pipe does not wait for a writer, and a link is an error: none was ever written.
SAFELY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def write_arrays(path: Path, arrays: Arrays) -> dict[str, Any]:
    """Write arrays to a file; return what `read_arrays` needs to know of them, for JSON.

    Not by orbax: where a write fails, the others that it began report to an event loop that is
    closed by then, which prints tracebacks.
    """
    total = 0
    with path.open("wb") as file:
        for array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            total = zlib.crc32(data, total)
            file.write(data)
    return {"arrays": [[str(x.dtype), list(x.shape)] for x in arrays], "crc32": total}


def read_about(path: Path, num_ids: int) -> Any:
    """Return what the JSON file about a segment of `num_ids` tokens holds.

    Raises:
      OSError, ValueError, RecursionError: it is none, or larger than such a file can be.
    """
    return json.loads(_read(path, None, ABOUT_BYTES + BYTES_PER_ID * num_ids))


def read_arrays(
    path: Path, about: Mapping[str, Any], *, kinds: Sequence[Kind] | None, max_bytes: int
) -> Arrays:
    """Return the arrays of a file that `write_arrays` wrote.

    Nothing is allocated for arrays of other kinds, nor for more than the file holds.

    Args:
      about: what `write_arrays` returned, as it was read back; it may hold anything.
      kinds: of the arrays to expect; None takes those that `about` lists.
      max_bytes: of the file, where `kinds` is None.

    Raises:
      OSError, ValueError, KeyError, TypeError: they are not the ones that were written.
    """
    said = about["arrays"]
    if kinds is not None and said != [[dtype, list(shape)] for dtype, shape in kinds]:
        raise ValueError(f"{path} holds other arrays than those of a segment")
    shapes = [(np.dtype(dtype), tuple(map(int, shape))) for dtype, shape in said]
    if any(dtype.hasobject or min(shape, default=0) < 0 for dtype, shape in shapes):
        raise ValueError(f"{path} is said to hold arrays that there are not")
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    if kinds is None and sum(sizes) > max_bytes:
        raise ValueError(f"{path} is said to hold {sum(sizes)} bytes")
    data = _read(path, sum(sizes), sum(sizes))
    if zlib.crc32(data) != about["crc32"]:
        raise ValueError(f"{path} is damaged")
    ends = list(itertools.accumulate(sizes))
    return [
        np.frombuffer(data[end - size : end], dtype).reshape(shape)
        for (dtype, shape), size, end in zip(shapes, sizes, ends, strict=True)
    ]


def _read(path: Path, size: int | None, max_bytes: int) -> bytes:
    """The bytes of a file that is `size` bytes long, if that is given, and at most `max_bytes`."""
    descriptor = os.open(path, SAFELY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no file")
        if found.st_size > max_bytes or size not in (None, found.st_size):
            raise ValueError(f"{path} is {found.st_size} bytes long")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(found.st_size)
    finally:
        os.close(descriptor)
    if len(data) != found.st_size:
        raise ValueError(f"{path} was cut off while it was read")
    return data


def mode_of(path: Path) -> int:
    """The type of what is at a path, links not followed; 0 if nothing is, or if the disk fails."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def is_folder(path: Path) -> bool:
    """Whether a folder is at a path, and no link to one."""
    return stat.S_ISDIR(mode_of(path))


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file, or a link alone; if possible."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
