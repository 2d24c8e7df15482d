"""Compiling for devices that are not here: names of devices, and reading of optimised HLO."""

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.compile_for.__main__ import table
from benchmarks.compile_for.devices import devices, mesh_of
from benchmarks.compile_for.hlo import accessed, launched, target_kernels
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.kernels.products import gather

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, of the extra `tpu`"
)

HLO = """HloModule step

%sums (a: bf16[16,64], b: bf16[64,32]) -> bf16[16,32] {
  %a = bf16[16,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[16,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}
}

%body (p: (s32[])) -> (s32[]) {
  %row = f32[8]{0:T(128)} copy(%x)
}

ENTRY %main (p: bf16[16,64]) -> bf16[16,32] {
  %p = bf16[16,64]{1,0} parameter(0)
  %q = bf16[16,32]{1,0:T(8,128)(2,1)} fusion(%p, %w), calls=%sums, metadata={op_name="jit/target/q"}
  %d = bf16[16,32]{1,0} fusion(%p, %w), calls=%sums, metadata={op_name="jit/draft/target/q"}
  %kept = bf16[16,32]{1,0:T(8,128)(2,1)S(1)} copy(%p)
  %loop = (s32[]) while(%t), condition=%cond, body=%body
}
"""


def test_launched_operations_are_found_in_loops_too() -> None:
    found = [(name, kind, size) for name, kind, size, _ in launched(HLO)]
    large = [("q", "fusion", 1024), ("d", "fusion", 1024)]
    assert found == [*large, ("kept", "copy", 0), ("row", "copy", 32)]


def test_kernels_of_the_target_are_compared_without_names() -> None:
    renamed = HLO.replace("%dot.1", "%dot.7").replace("%q =", "%fusion.3 =")
    assert sum(target_kernels(HLO).values()) == 1
    assert target_kernels(renamed) == target_kernels(HLO)
    relaid = HLO.replace("bf16[64,32]{1,0}", "bf16[64,32]{0,1}")
    assert target_kernels(relaid) != target_kernels(HLO)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("v9", RequestError, "known: H100, H200, B200, v5e, v5p, v6e"),
        ("H100:2x2", RequestError, "is unknown"),
        ("", RequestError, "is unknown"),
        ("v6e-7", PlanError, "v6e-7 has 7 chips; expected one of 1, 4, 8"),
        ("H200", RequestError, "--cuda is the folder of JAX's plugin"),
    ],
)
def test_devices_that_do_not_exist_are_refused(
    name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        devices(name)


@pytest.mark.parametrize("shape", ["1x3", "8", "2x2x2", "ax8", "16x1"])
def test_a_mesh_that_does_not_divide_the_chips_is_refused(shape: str) -> None:
    with pytest.raises(PlanError, match=f"mesh is '{shape}' for 8 devices"):
        mesh_of(shape, [SimpleNamespace(id=i) for i in range(8)])


def test_the_table_names_what_does_not_fit_and_what_differs() -> None:
    row = {"model": "m", "weights": "float", "kernels": "auto", "argument_bytes": 2_000_000_000}
    row |= {"temporary_bytes": 10 << 20, "accessed_bytes": 2_500_000_000}
    plain = row | {"program": "plain"}
    fused = row | {"program": "fused", "target_as_in_plain": False}
    large = {"model": "n", "weights": "float", "kernels": "auto", "program": "plain"}
    large |= {"does_not_fit": "Used 30G of 16G."}
    lines = table({"v5e": {"programs": [plain, fused, large]}})
    assert lines[-2] == "| v5e | m, float | 2.0 GB | 10.0, 10.0 MiB | 1.25, 1.25 | no | - |"
    assert lines[-1].startswith("| v5e | n, float | Used 30G of 16G. |")


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """Programs for devices that are not here cannot be loaded from it."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@needs_libtpu
def test_a_topology_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match="there is no TPU topology v6e:3x5"):
        devices("v6e:3x5")


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e"])
def test_a_tpu_looks_up_embeddings_without_copying_their_table(
    name: str, no_compilation_cache: None
) -> None:
    where = SingleDeviceSharding(devices(name)[0])
    table = jax.ShapeDtypeStruct((1024, 32768), jnp.bfloat16, sharding=where)
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32, sharding=where)
    lookup = jax.jit(lambda w, ids: gather(w, ids, jnp.dtype("bfloat16")))
    memory = lookup.lower(table, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.size * 2 / 16


GATHER = """HloModule step

%looked_up (table: bf16[1000,64], at: s32[4]) -> bf16[4,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %at = s32[4]{0} parameter(1)
  ROOT %g = bf16[4,64]{1,0} gather(%table, %at), offset_dims={1}
}

%put (cache: bf16[8,64], row: bf16[1,64], i: s32[]) -> bf16[8,64] {
  %cache = bf16[8,64]{1,0} parameter(0)
  %row = bf16[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = bf16[8,64]{1,0} dynamic-update-slice(%cache, %row, %i, %i)
}

ENTRY %main (t: bf16[1000,64]) -> bf16[8,64] {
  %t = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %c = bf16[8,64]{1,0} parameter(2)
  %r = bf16[1,64]{1,0} parameter(3)
  %n = s32[] parameter(4)
  %found = bf16[4,64]{1,0} fusion(%t, %ids), kind=kLoop, calls=%looked_up
  %written = bf16[8,64]{1,0} fusion(%c, %r, %n), kind=kLoop, calls=%put
  %all = bf16[1000,64]{1,0} copy(%t)
}
"""


def test_of_arrays_that_are_gathered_from_or_updated_only_a_part_is_moved() -> None:
    assert accessed(GATHER) == {
        "found": 4 * 64 * 2 + 4 * 4 + 4 * 64 * 2,
        "written": 3 * 128,  # without its scalar
        "all": 2 * 1000 * 64 * 2,
    }
