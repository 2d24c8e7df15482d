"""Products by tiles of AMX: the bits of products without, and processes that have none."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from dflash_jax.kernels.native import build as native
from dflash_jax.kernels.native.build import library
from dflash_jax.quant.layouts import KINDS
from tests.kernels.test_products import BY_EXPERTS, MULTIPLY, draw, stack, weights

needs_amx = pytest.mark.skipif(
    not library() or bool(library().no_amx),
    reason=f"products are without AMX: {library().no_amx or library().reason}",
)
ROWS = {
    1: (1, 16, 33),
    40: (1, 2, 3, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 80),
    4099: (2, 17, 64),
}


@pytest.fixture
def restored() -> Iterator[None]:
    """Products are by AMX after the test, too."""
    yield
    assert native.use_amx(library().path) == ""


def compare(x: np.ndarray, w: object) -> None:
    """Compare the bits of a product by AMX and without."""
    path = library().path
    assert native.use_amx(path) == ""
    found = np.asarray(MULTIPLY(x, w))
    assert native.use_amx(path, wanted=False)
    wanted = np.asarray(MULTIPLY(x, w))
    np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32), str(x.shape))


@needs_amx
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("columns", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_by_amx_have_the_bits_of_those_without(kind: str, columns: int) -> None:
    """Columns of an odd number of strips, and enough for several threads; outliers in some rows."""
    w, x = weights(kind, 256, columns), draw(80, 256)
    x[::3, 7] *= 50
    x[1::5, [3, 200]] *= -3000
    x[4], x[9, 5] = 0, np.nan
    for rows in ROWS[columns]:
        compare(x[:rows], w)


@needs_amx
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_products_by_experts_have_the_bits_of_those_without_amx(kind: str) -> None:
    """Some experts have rows enough for tiles, and some have not."""
    w, x = stack(kind, 4, 256, 1035), draw(80, 256)
    expert = np.random.default_rng(0).choice(4, 80, p=(0.6, 0.3, 0.08, 0.02))
    path, found = library().path, []
    for wanted in (True, False):
        native.use_amx(path, wanted=wanted)
        found.append(np.asarray(BY_EXPERTS(x, expert, w)).view(np.int32))
    np.testing.assert_array_equal(*found)


@needs_amx
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("depth", [1, 4, 60, 63, 64, 65, 128, 130, 192, 200])
def test_any_depth_may_be_multiplied(depth: int) -> None:
    compare(draw(20, depth), weights("int8", depth, 33))


@needs_amx
@pytest.mark.usefixtures("restored")
def test_many_rows_are_multiplied_in_parts_that_stay_in_the_cache() -> None:
    compare(draw(300, 8192), weights("int8", 8192, 40))


@needs_amx
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("kind", "depth"), [("Q8_0", 1248), ("Q4_1", 64), ("Q6_K", 1280)])
def test_groups_are_unpacked_some_at_a_time(kind: str, depth: int) -> None:
    """An odd number of groups, few, and more than are unpacked; rows for several parts."""
    compare(draw(300, depth), weights(kind, depth, 40))


@needs_amx
@pytest.mark.usefixtures("restored")
def test_a_level_turns_amx_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("avx512", "AVX2"):
        monkeypatch.setenv(native.ENVIRONMENT, setting)
        assert native.choose_amx(library().path) == f"DFLASH_NATIVE is {setting}"
    for setting in ("amx", "on", "", "/folder"):
        monkeypatch.setenv(native.ENVIRONMENT, setting)
        assert native.choose_amx(library().path) == ""


REFUSED = """
import ctypes
import sys

# A filter of system calls, as containers have them: arch_prctl (158) fails, others are allowed.
RULES = (0x20, 0, 0, 0), (0x15, 0, 1, 158), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)

class Rule(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte),
                ("k", ctypes.c_uint)]

class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.POINTER(Rule))]

rules = (Rule * len(RULES))(*(Rule(*rule) for rule in RULES))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(Filter(len(rules), rules)), 0, 0):
    sys.exit("no filter")
print(ctypes.CDLL(sys.argv[1]).dflash_use_tiles(1))
"""


@needs_amx
def test_a_process_without_permission_multiplies_without_amx() -> None:
    command = [sys.executable, "-c", REFUSED, str(library().path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "no filter" in done.stderr:
        pytest.skip("this system does not let a process filter its system calls")
    assert done.returncode == 0, done.stderr
    assert "permit" in native.NO_TILES[int(done.stdout)]
