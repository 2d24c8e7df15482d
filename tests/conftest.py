"""Strict array semantics for every test: no implied dtype or rank promotion."""

from pathlib import Path

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.testing import random_engine, scripted_engine, tiny_drafter, tiny_target

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ORACLE = Path(__file__).parent / "oracle"


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Vectors from Hugging Face transformers and the official dflash package."""
    return ORACLE


@pytest.fixture(scope="session")
def tiny() -> Engine:
    """A random two-layer target and its drafter, one row, blocks of 4: compiled once."""
    return make_tiny(rows=1)


@pytest.fixture(scope="session")
def tiny3() -> Engine:
    """The same weights with three rows."""
    return make_tiny(rows=3)


@pytest.fixture(scope="session")
def scripted(tiny: Engine) -> Engine:
    """The weights of `tiny`; its drafter says what `set_script` tells it."""
    return scripted_engine(tiny)


def make_tiny(rows: int) -> Engine:
    target = tiny_target(num_layers=2, vocab_size=251)
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    return random_engine(target, drafter, Plan(rows=rows, max_length=128, chunk=16, block=4))
