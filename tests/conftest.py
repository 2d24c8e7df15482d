"""Strict array semantics for every test: no implied dtype or rank promotion."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ORACLE = Path(__file__).parent / "oracle"


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Vectors from Hugging Face transformers and the official dflash package."""
    return ORACLE
