"""Files of the prefix cache: written once, and read without trusting their contents."""

import itertools
import json
import math
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dflash_jax.utils.private_folder import open_file

Arrays = list[np.ndarray]  # the leaves of a segment
Kinds = Sequence[tuple[str, tuple[int, ...]]]  # dtypes and shapes of arrays
ABOUT_BYTES = 2**20  # more than any description of a segment takes, without its token ids
BYTES_PER_ID = 24  # digits, comma and space of a token id in JSON


def write_arrays(path: Path, arrays: Arrays) -> dict[str, Any]:
    """Write arrays to a file; return a description of them for `read_arrays`, as JSON values.

    Orbax is not used: if one of its writes fails, the others report to an event loop that is
    already closed, which prints tracebacks.
    """
    total = 0
    with _new(path) as file:
        for array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            total = zlib.crc32(data, total)
            file.write(data)
    return {"arrays": [[str(x.dtype), list(x.shape)] for x in arrays], "crc32": total}


def write_about(path: Path, about: Mapping[str, Any]) -> None:
    """Write the description of a segment, which holds its tokens, as JSON."""
    with _new(path) as file:
        file.write(json.dumps(about).encode())


def _new(path: Path) -> BinaryIO:
    """Open a new file for writing that only the user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def read_about(path: Path, num_ids: int) -> Any:
    """Return the contents of the JSON file that describes a segment of `num_ids` tokens.

    Raises:
      OSError, ValueError, RecursionError: the file is not JSON, or too large.
    """
    return json.loads(_read(path, None, ABOUT_BYTES + BYTES_PER_ID * num_ids))


def read_arrays(
    path: Path, about: Mapping[str, Any], *, kinds: Kinds | None, max_bytes: int
) -> Arrays:
    """Return the arrays of a file that `write_arrays` wrote.

    Nothing is allocated for arrays of other kinds, nor for more than the file holds.

    Args:
      about: the description that `write_arrays` returned, read from disk; not trusted.
      kinds: dtypes and shapes to expect; None accepts those that `about` lists.
      max_bytes: limit of the file's size if `kinds` is None.

    Raises:
      OSError, ValueError, KeyError, TypeError: the arrays are not those that were written.
    """
    listed = about["arrays"]
    if kinds is not None and listed != [[dtype, list(shape)] for dtype, shape in kinds]:
        raise ValueError(f"{path} holds other arrays than those of a segment")
    shapes = [(np.dtype(dtype), tuple(map(int, shape))) for dtype, shape in listed]
    if any(dtype.hasobject or min(shape, default=0) < 0 for dtype, shape in shapes):
        raise ValueError(f"{path} is described with impossible arrays")
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    if kinds is None and sum(sizes) > max_bytes:
        raise ValueError(f"{path} is described with more than {max_bytes} bytes")
    data = _read(path, sum(sizes), sum(sizes))
    if zlib.crc32(data) != about["crc32"]:
        raise ValueError(f"{path} is damaged")
    ends = list(itertools.accumulate(sizes))
    return [
        np.frombuffer(data[end - size : end], dtype).reshape(shape)
        for (dtype, shape), size, end in zip(shapes, sizes, ends, strict=True)
    ]


def _read(path: Path, size: int | None, max_bytes: int) -> bytes:
    """Return the bytes of a file whose size must be `size`, if given, and at most `max_bytes`."""
    descriptor = open_file(path)
    try:
        found = os.fstat(descriptor)
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
    """Return the file mode at a path, without following links; 0 if that fails."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    return stat.S_ISDIR(mode_of(path))
