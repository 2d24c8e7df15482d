"""Strict array semantics for every test: no implied dtype or rank promotion."""

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.testing import (
    QUICK_COMPILE,
    random_engine,
    scripted_engine,
    tiny_drafter,
    tiny_target,
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in runs that a shell put behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(100_000, 50, 100)  # traces of programs are millions of objects, and few die
# Nobody looks up which line an operation of a program came from; to note it takes time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # for commands that tests start
jax.config.update("jax_traceback_in_locations_limit", 0)

BETWEEN = 4  # files that are run until their traces are forgotten
_files = itertools.count(1)
ORACLE = Path(__file__).parent / "oracle"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for tests that do not depend on compiler optimisations."""
    parser.addoption("--quick-compile", action="store_true", help="compile without optimising")


def pytest_configure(config: pytest.Config) -> None:
    """Let workers and later runs share compiled programs, but not with the user.

    Commands that tests start without JAX's variables use a folder inside the cache of the tests,
    and show no progress.
    """
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("home"))
    os.environ.pop("DFLASH_COMPILATION_CACHE", None)
    os.environ.pop("DFLASH_PROGRESS", None)
    if config.getoption("--quick-compile"):
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_COMPILE])
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = {
            "jax_compilation_cache_dir": str(config.cache.mkdir("compiled")),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        for name, value in cache.items():
            os.environ[name.upper()] = str(value)  # for workers, and commands that tests start
            jax.config.update(name, value)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases outside the sample of their test as exhaustive; give soak tests an hour each."""
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None and item.callspec.id not in sample.args:  # type: ignore[attr-defined]
            item.add_marker("exhaustive")
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_collection_finish() -> None:
    """Look for garbage among later objects only: modules and tests are a million that stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forgotten_traces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget engines that functions of a file cache, as a process can map a limited number of
    programs, and after some files all traces, which make compiling several times slower.
    """
    yield
    name = request.module.__name__
    for function in vars(request.module).values():
        if getattr(function, "__module__", "") == name and hasattr(function, "cache_clear"):
            function.cache_clear()
    if next(_files) % BETWEEN == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Vectors from Hugging Face transformers and the official dflash package."""
    return ORACLE


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    """Name a GPU: from jax 0.11 on, GPU kernels are lowered for a present or a named one."""
    device = AbstractDevice("NVIDIA H100", None, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


@pytest.fixture(scope="session")
def tiny() -> Engine:
    """A random two-layer target and a one-layer drafter, one row, blocks of 4: compiled once."""
    return make_tiny(rows=1)


@pytest.fixture(scope="session")
def tiny3() -> Engine:
    """The same weights with three rows."""
    return make_tiny(rows=3)


@pytest.fixture(scope="session")
def scripted(tiny: Engine) -> Engine:
    """The weights of `tiny` with a drafter that follows `set_script`."""
    return scripted_engine(tiny)


def make_tiny(rows: int) -> Engine:
    target = tiny_target(num_layers=2, vocab_size=251)
    one: dict[str, Any] = {"num_layers": 1, "windows": (12,), "causal": (False,)}
    drafter = tiny_drafter(target, target_layer_ids=(0,), **one)
    return random_engine(
        target, drafter, Plan(rows=rows, max_length=128, chunk=16, block=4), seed=1
    )
