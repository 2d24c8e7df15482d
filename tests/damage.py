"""Seeded damage to files, tensors and JSON, for tests of the code that reads them."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

NUMBERS = [0, 1, 2, 3, 7, 32, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
NUMBERS += [2**40, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
DTYPES = ("f2", "f4", "i1", "i4", "i8", "u1", "?")
VALUES = (
    None, 0, -1, 1, 3, 4, 8, 33, 2**40, 1.5, float("nan"), True, "x", "gemm", "gptq_v2",
    "pack-quantized", [], {}, [1], {"a": 1},
)  # fmt: skip
Tensors = dict[str, np.ndarray]


def apply(raw: bytes, damage: Sequence[tuple]) -> bytes:
    """Return bytes after changes: their kind, their place, and what is written there."""
    for kind, at, what in damage:
        if kind == "byte":
            raw = raw[:at] + what + raw[at + len(what) :]
        elif kind in ("u64", "u32"):
            width = 8 if kind == "u64" else 4
            raw = raw[:at] + struct.pack("<Q", what)[:width] + raw[at + width :]
        elif kind == "cut":
            raw = raw[:at]
        elif kind == "delete":
            raw = raw[:at] + raw[at + what :]
        elif kind == "insert":
            raw = raw[:at] + what + raw[at:]
        elif kind == "repeat":
            raw = raw[:at] + raw[at : at + what] + raw[at:]
        else:
            raw = raw[:at] + what.encode() + raw[at + 1 :]
    return raw


def damaged_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Return bytes with one to three changes, anywhere or in the first kilobyte."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(rng.choice([len(raw), min(len(raw), 1024)]), 1))
        flipped = bytes([raw[at] ^ 1 << rng.randrange(8)]) if raw else b"x"
        change = rng.choice(
            [
                ("byte", at, flipped),
                ("byte", at, rng.randbytes(rng.randint(1, 4))),
                (rng.choice(["u32", "u64"]), at, rng.choice(NUMBERS)),
                ("cut", at, 0),
                ("delete", at, rng.randint(1, 64)),
                ("insert", at, rng.randbytes(rng.randint(1, 64))),
                ("repeat", at, rng.randint(1, 256)),
            ]
        )
        raw = apply(raw, [change])
    return raw


def damaged_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """Return a tensor of another shape, dtype or content."""
    half = len(array) // 2 if array.ndim else 0
    changes: list[Callable[[], np.ndarray]] = [
        lambda: array[:half],
        lambda: array[..., :half],
        lambda: array.T,
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array.astype(rng.choice(DTYPES)),
        lambda: np.concatenate([array, array]),
        lambda: np.full_like(array, rng.choice([-1, 0, 1, 127])),
    ]
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(rng.choice(changes)())


def changed(rng: random.Random, value: Any) -> Any:
    """Return JSON with one value replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return value | {key: changed(rng, value[key])}
    return rng.choice(VALUES)


def damaged_tensors(
    rng: random.Random, tensors: Tensors, settings: Any, *, most: int = 2
) -> tuple[Tensors, Any]:
    """Return tensors and JSON settings with up to `most` changes each."""
    for _ in range(rng.randrange(most + 1)):
        settings = changed(rng, settings)
    for name in rng.sample(list(tensors), min(rng.randrange(most + 1), len(tensors))):
        if rng.random() < 0.1:
            del tensors[name]
        elif rng.random() < 0.1:
            tensors[f"{name}.more"] = tensors[name]
        else:
            tensors[name] = damaged_array(rng, tensors[name])
    return tensors, settings


def damage_folder(rng: random.Random, folder: Path) -> str:
    """Damage one file of a folder; return its name and the kind of damage."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    large = rng.choices(files, [path.stat().st_size for path in files])[0]
    path = rng.choice([rng.choice(files), large])
    kinds = ["bytes"] * 3 + ["file"]
    if path.suffix == ".json":
        kinds += ["json"] * 3
    elif path.suffix == ".safetensors":
        kinds += ["tensors"] * 3
    kind = rng.choice(kinds)
    if kind == "bytes":
        path.write_bytes(damaged_bytes(rng, path.read_bytes()))
    elif kind == "json":
        _damage_json(rng, path)
    elif kind == "tensors":
        _damage_tensors(rng, path)
    else:
        kind = _damage_file(rng, path, rng.choice(files))
    return f"{path.relative_to(folder)}: {kind}"


def _damage_json(rng: random.Random, path: Path) -> None:
    value = json.loads(path.read_text())
    if isinstance(value, dict) and value and rng.random() < 0.3:
        del value[rng.choice(list(value))]
    path.write_text(json.dumps(changed(rng, value) if rng.random() < 0.8 else value))


def _damage_tensors(rng: random.Random, path: Path) -> None:
    with safetensors.safe_open(path, "np") as opened:
        metadata = opened.metadata()
    tensors, _ = damaged_tensors(rng, safetensors.numpy.load_file(path), None)
    safetensors.numpy.save_file(tensors, path, metadata=metadata)


def _damage_file(rng: random.Random, path: Path, other: Path) -> str:
    kind = rng.choice(["missing", "empty", "another file", "folder", "link to itself", "zeros"])
    content, size = other.read_bytes(), path.stat().st_size
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "another file":
        path.write_bytes(content)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "zeros":
        path.write_bytes(bytes(size))
    return kind


def copy(folder: Path, place: Path) -> Path:
    """Copy a folder, replacing what is at the place."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(folder, place))
