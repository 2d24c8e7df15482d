"""Wheels with compiled kernels: what the build hook adds, and what an installed one loads."""

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dflash_jax.kernels.native import build as native
from dflash_jax.kernels.native import compiling, shipped
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.compiling import AVX2, AVX512, LEVELS
from tests.kernels.fake_compiler import WRITES, compiler, outputs

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
INSIDE = "dflash_jax/kernels/native/compiled"
FILES = {f"{INSIDE}/{name}" for name in ("about.json", *(f"{x.name}.so" for x in LEVELS))}
on_linux = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="kernels are compiled for Linux on x86-64",
)


def wheel(folder: Path, **variables: str) -> Path:
    """Build a wheel; return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    environment = os.environ | {"HATCH_BUILD_HOOKS_ENABLE": "1"} | variables
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=200)
    [built] = folder.glob("*.whl")
    return built


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as file:
        return {x for x in file.namelist() if x.startswith(INSIDE)}


@on_linux
@pytest.mark.parametrize(
    ("needs", "tag"), [("GLIBC_2.2.5 GLIBC_2.28 GLIBC_2.9", "manylinux_2_28"), ("", "linux")]
)
def test_the_build_hook_adds_a_library_for_each_level(tmp_path: Path, needs: str, tag: str) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install '.[dev]'")
    fake = compiler(tmp_path / "cxx", WRITES.replace("echo made", f"echo {needs or 'nothing'}"))
    built = wheel(tmp_path, CXX=fake)
    assert built.name.endswith(f"-py3-none-{tag}_x86_64.whl")
    assert names(built) == FILES
    assert [name for name in outputs(Path(fake)) if name.endswith(".so")] == [
        f"{level.name}.so" for level in LEVELS
    ]
    with zipfile.ZipFile(built) as file:
        about = json.loads(file.read(f"{INSIDE}/about.json"))
        found = file.read(f"{INSIDE}/avx2.so")
    assert about["libraries"]["avx2"] == hashlib.sha256(found).hexdigest()
    assert not (ROOT / "dflash_jax" / "native" / "compiled").exists()


@pytest.mark.parametrize("text", ["exit 1", None], ids=["one that fails", "none"])
def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path, text: str | None) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install '.[dev]'")
    fake = compiler(tmp_path / "cxx", text) if text else str(tmp_path / "absent")
    built = wheel(tmp_path, CXX=fake)
    assert built.name.endswith("-py3-none-any.whl")
    assert names(built) == set()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shipped libraries of the levels avx512 and avx2, for these sources."""
    digests = {}
    for level in (AVX512, AVX2):
        (tmp_path / f"{level.name}.so").write_text(level.name)
        digests[level.name] = hashlib.sha256(level.name.encode()).hexdigest()
    about = {"sources": compiling.digest(compiling.source_texts()), "libraries": digests}
    (tmp_path / shipped.ABOUT).write_text(json.dumps(about))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.delenv(native.ENVIRONMENT, raising=False)
    monkeypatch.setattr(native, "features", lambda: AVX512.needs)
    return tmp_path


def loaded(monkeypatch: pytest.MonkeyPatch) -> native.Library:
    """Find the kernels as a new process would, without loading them."""
    monkeypatch.setattr(native, "_register", lambda path: None)
    monkeypatch.setattr(native, "build", lambda level, shown: Path(f"/cache/a-b-{level.name}.so"))
    return native._library.__wrapped__()


def test_the_best_level_of_the_processor_that_is_shipped_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(monkeypatch).path == folder / "avx512.so"
    for level in LEVELS[1:]:  # none for AVX-VNNI is among them
        monkeypatch.setattr(native, "features", lambda level=level: level.needs)
        found = loaded(monkeypatch)
        assert (found.path, found.level) == (folder / "avx2.so", "avx2")
        assert found.digest == hashlib.sha256(b"avx2").hexdigest()
    monkeypatch.setattr(native, "features", lambda: AVX512.needs)
    monkeypatch.setenv(native.ENVIRONMENT, "avx2")
    assert loaded(monkeypatch).path == folder / "avx2.so"


@pytest.mark.parametrize("damage", [b"", b"avx51", None])
def test_damaged_shipped_libraries_are_not_loaded(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: bytes | None,
) -> None:
    path = folder / "avx512.so"
    path.write_bytes(damage) if damage is not None else path.unlink()
    with caplog.at_level(logging.WARNING):
        assert loaded(monkeypatch).path == Path("/cache/a-b-avx512.so")
    assert "are damaged" in caplog.text
    assert "reinstall dflash-jax" in caplog.text


def test_shipped_libraries_of_other_sources_are_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "FLAGS", ("-O0",))
    assert loaded(monkeypatch).path == Path("/cache/a-b-avx512.so")
    assert caplog.text == ""


INSTALLED = """
import sys
from pathlib import Path
import numpy as np
from dflash_jax.kernels.native import shipped
shipped.FOLDER = Path(sys.argv[1])
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.layers import largest
print(library().path)
print(int(largest(np.float32([[1, 3, 2]]))[0][0]))
"""


@pytest.mark.skipif(not library(), reason=library().reason)
def test_a_shipped_library_computes_without_a_compiler_or_a_cache(tmp_path: Path) -> None:
    found = library()
    [level] = [level for level in LEVELS if level.name == found.level]
    (tmp_path / f"{level.name}.so").write_bytes(found.path.read_bytes())
    about = {"sources": compiling.digest(compiling.source_texts())}
    about |= {"libraries": {level.name: found.digest}}
    (tmp_path / shipped.ABOUT).write_text(json.dumps(about))
    variables = os.environ | {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", INSTALLED, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / f"{level.name}.so"), "1"]
    assert not (tmp_path / "cache" / "dflash_jax").exists()


# Prints the bits of products of every kind, of attention, and of the operations of rows.
BITS = """
import hashlib
import sys
from pathlib import Path
from dflash_jax.kernels.native import shipped
if sys.argv[1:]:
    shipped.FOLDER = Path(sys.argv[1])
import jax
import numpy as np
from dflash_jax.kernels.native.build import library
from dflash_jax.kernels.native.layers import largest, normalise, prepare_heads
from tests.kernels import test_layers as layers
from tests.kernels import test_products as products

assert library(), library().reason
bits = []
for kind in ("float32", "bfloat16", *products.KINDS):
    w = products.weights(kind, 512, 40)
    for rows in (1, 5, 16):
        bits.append(np.asarray(products.MULTIPLY(products.draw(rows, 512), w)).tobytes())
x = products.draw(7, 100)
angles = products.draw(1, 7, 50)
rows = normalise(x, x[:1], 1e-6), largest(x)[0]
rows += (prepare_heads(x[None, :, None], None, angles, angles),)
for dtype in ("float32", "bfloat16", "int8"):
    q, cache, seen = layers.attention(4, 2, 40, 48, dtype)
    rows += (layers.ATTEND(q, cache, seen, None),)
bits += [np.asarray(row).tobytes() for row in rows]
print(library().path)
print(hashlib.sha256(b"".join(bits)).hexdigest())
"""


@pytest.mark.soak
@pytest.mark.parametrize("level", [level for level in LEVELS if level in native.usable_levels()])
def test_shipped_and_local_libraries_compute_the_same_bits(
    tmp_path: Path, level: compiling.Level
) -> None:
    """Compiled as a wheel's and as on first use, by this compiler."""
    made = tmp_path / "made"
    made.mkdir()
    shipped.write(made, compiling.find_compiler(), [level])
    found = []
    for arguments in ([str(made)], []):
        variables = os.environ | {native.ENVIRONMENT: level.name}
        command = [sys.executable, "-c", BITS, *arguments]
        done = subprocess.run(
            command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert Path(found[0][0]).parent == made
    assert Path(found[1][0]).parent != made
    assert found[0][1] == found[1][1]
