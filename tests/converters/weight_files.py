"""Small weight files for the converter tests, written without our own code."""

import json
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).resolve().parents[1] / "oracle"


def raw_safetensors(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file from a header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
