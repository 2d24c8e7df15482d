"""Small weight files for the converter tests, written without our own code."""

import json
import struct
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).resolve().parents[1] / "oracle"


def raw_safetensors(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file from a header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def pages_in_memory(file: Path) -> int:
    """Return the bytes of a mapped file that this process has in memory."""
    mappings = Path("/proc/self/smaps").read_text().split(str(file))[1:]
    return sum(int(text.split("Rss:")[1].split()[0]) * 1024 for text in mappings)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, body: bytes) -> bytes:
    """A GGUF metadata entry."""
    return text(name) + struct.pack("<I", kind) + body


def tensor(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    """A GGUF tensor entry."""
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def raw_gguf(
    keys: list[bytes] = (),
    tensors: list[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file from its pieces, valid or not."""
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
