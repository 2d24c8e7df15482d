"""Compiled programs on disk: found without tracing, and only where nothing else would be traced."""

import errno
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.engine.engine import Engine
from dflash_jax.graph import build, stored
from dflash_jax.graph.identity import Identities
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.steps import acceptance, decoding
from dflash_jax.graph.stored import StoredPrograms, stored_programs
from dflash_jax.nn.decoder import Attention
from dflash_jax.testing import tiny_target
from dflash_jax.utils.store import Store

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
KEY = ProgramKey(Step.CLEAR_ROWS)
CLEARED = ProgramKey(Step.CLEAR_ROWS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, which JAX's cache knows nothing of."""
    monkeypatch.setattr(stored, "_hits", lambda: 0)
    return tmp_path


def second(a: jax.Array, b: jax.Array) -> jax.Array:
    return b + 1


def first(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + 1


def compiled(programs: StoredPrograms, program: Program) -> Any:
    return programs.compile(program, build.lower(program))


def test_a_program_is_found_without_tracing_it(tiny: Engine, tmp_path: Path) -> None:
    program = declare(tiny.graph)[CLEARED]
    made = build._compile(program, StoredPrograms(tmp_path, build.OPTIONS))
    with jax.no_tracing():
        again = build._compile(program, StoredPrograms(tmp_path, build.OPTIONS))
    assert (made.cached, again.cached) == (False, True)
    assert again.compiled is not made.compiled
    assert again.aliased_bytes == made.aliased_bytes > 0
    assert again.stablehlo == made.stablehlo


def test_a_replaced_function_method_or_constant_makes_another_program(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = declare(tiny.graph)[tiny.graph.key(Step.PLAIN)]
    seen = {Identities({}).of(program)}
    replaced: list[tuple[Any, str, Any]] = [
        (decoding, "accept", lambda *arguments: None),
        (acceptance, "accept", second),
        (Attention, "over_heads", second),
        (build, "OPTIONS", {"xla_cpu_enable_fast_math": True}),
        (decoding, "COPIED", 7),
    ]
    for owner, name, value in replaced:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            seen.add(Identities(build.OPTIONS if owner is build else {}).of(program))
    assert Identities({}).of(program) in seen
    assert None not in seen
    assert len(seen) == 1 + len(replaced)


def test_programs_of_other_plans_configs_and_variants_differ(tiny: Engine) -> None:
    names = [
        tiny.graph.key(step, variant)
        for step, variant in (
            (Step.SPECULATIVE, Variant.SAMPLED),
            (Step.VERIFY, Variant.CONSTRAINED),
        )
    ]
    graphs = [tiny.graph, tiny.graph.with_plan(block=2), tiny.graph.with_plan(max_length=64)]
    found = [Identities({}).of(declare(graph)[name]) for graph in graphs for name in names]
    assert None not in found
    assert len(set(found)) == len(found)


def test_modules_of_other_packages_are_traced_each_time() -> None:
    class Other(type(tiny_target())):  # type: ignore[misc]
        pass

    def run(config: Any, number: Any) -> Any:
        return number

    for value in (Other, second, run, object(), NUMBER):
        program = Program(KEY, run, (value,))
        assert Identities({}).of(program) is None


def test_equal_texts_of_other_arguments_are_other_programs(folder: Path) -> None:
    """Arguments that are not used are no part of a text."""
    programs = StoredPrograms(folder, {})
    unused = jnp.ones(3)
    several = jax.ShapeDtypeStruct(unused.shape, unused.dtype)
    for _ in range(2):
        run = compiled(programs, Program(KEY, first, (NUMBER, NUMBER)))
        assert run(jnp.float32(1), jnp.float32(2)) == 2
        run = compiled(programs, Program(KEY, second, (NUMBER, NUMBER)))
        assert run(jnp.float32(1), jnp.float32(2)) == 3
        run = compiled(programs, Program(KEY, first, (NUMBER, several)))
        assert run(jnp.float32(1), unused) == 2
    assert len([*folder.glob("*.program")]) == 3


def test_a_file_that_is_no_program_is_removed_and_written_again(folder: Path) -> None:
    programs = StoredPrograms(folder, {})
    program = Program(KEY, first, (NUMBER, NUMBER))
    compiled(programs, program)
    [path] = folder.glob("*.program")
    no_pickle = functools.partial(programs._programs.put, path.stem, [b"?"])
    for damage in (functools.partial(path.write_bytes, b""), no_pickle):
        damage()
        damaged = path.read_bytes()
        assert compiled(programs, program)(jnp.float32(1), jnp.float32(2)) == 2
        assert path.read_bytes() != damaged


def test_a_program_of_jaxs_cache_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0, 1])
    monkeypatch.setattr(stored, "_hits", lambda: next(counts))
    run = compiled(StoredPrograms(tmp_path, {}), Program(KEY, first, (NUMBER, NUMBER)))
    assert run(jnp.float32(1), jnp.float32(2)) == 2
    assert not [*tmp_path.iterdir()]


def test_jaxs_cache_neither_gives_nor_gets_these_programs(tmp_path: Path) -> None:
    least = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[least]
    cache = Path(jax.config.values["jax_compilation_cache_dir"])
    program = Program(KEY, first, (NUMBER, NUMBER))
    try:
        jax.config.update(least, 0)
        build.lower(program).compile()
        kept = set(cache.iterdir())
        assert [path for path in kept if path.name.startswith(f"jit_{KEY.identifier}-")]
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            compiled(StoredPrograms(tmp_path / name, {}), program)
            assert [*(tmp_path / name).glob("*.program")]
        assert set(cache.iterdir()) == kept
    finally:
        jax.config.update(least, before)


def test_a_full_disk_costs_only_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "put", full)
    program = Program(KEY, first, (NUMBER, NUMBER))
    assert compiled(StoredPrograms(folder, {}), program)(jnp.float32(1), jnp.float32(2)) == 2
    assert not [*folder.iterdir()]


def test_programs_are_kept_where_jaxs_cache_is_and_only_on_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = [jax.config.values[name] for name in names]
    programs = tmp_path / "programs"
    try:
        jax.config.update(names[0], str(tmp_path))
        assert stored_programs({})
        assert programs.stat().st_mode & 0o777 == 0o700
        programs.chmod(0o777)
        assert stored_programs({}) is None
        programs.chmod(0o700)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            assert stored_programs({}) is None
        jax.config.update(names[1], False)
        assert stored_programs({}) is None
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


def test_programs_with_places_are_not_kept(tmp_path: Path) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)
    programs = StoredPrograms(tmp_path, {})
    for program in (
        Program(KEY, first, (placed, NUMBER)),
        Program(KEY, first, (NUMBER, NUMBER), placement=place),
    ):
        assert programs.load(program) is None
        assert compiled(programs, program)(jnp.float32(1), jnp.float32(2)) == 2
    assert not [*tmp_path.iterdir()]


CHILD = """
import os, sys
from pathlib import Path
from benchmarks.audit.models import Setup, random_engine
from dflash_jax import Plan
from dflash_jax.graph import build, stored
from dflash_jax.graph.cache import use_compilation_cache

use_compilation_cache(Path(sys.argv[1]))
shape = {"num_layers": 2, "recurrent": (True, False)}
one = {"num_layers": 1, "windows": (12,), "causal": (False,)}
setup = Setup(family="qwen3_5", drafter="dflash2", shape=shape, drafter_shape=one, weights_seed=1)
if len(sys.argv) > 2:
    build.lower = None
engine = random_engine(setup, Plan(rows=1, chunk=8, max_length=64, kernels="xla"))
print(engine.generate([1, 2, 3], max_tokens=8, ignore_eos=True).token_ids)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_another_process_runs_what_it_has_not_traced_and_calls_lapack(
    tmp_path: Path, devices: int
) -> None:
    outputs = []
    for arguments in ([], ["without tracing"]):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "xla"), *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
