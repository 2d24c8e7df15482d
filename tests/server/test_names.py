"""Names of models: aliases, any name, and the name that a response repeats."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_jax.cli import parser
from dflash_jax.cli.serve import check
from dflash_jax.errors import RequestError
from dflash_jax.server.protocol import Problem
from dflash_jax.server.served_models import ServedModels, answer_name

MODELS: list[Any] = [
    SimpleNamespace(name=name, last_used_ms=used) for name, used in (("tiny", 1), ("small", 2))
]
ALIASES = (("claude-sonnet", "tiny"), ("claude-haiku", "tiny"))


def test_an_alias_is_another_name_of_a_model() -> None:
    models = ServedModels(MODELS, ALIASES)
    assert [models.named(name).name for name in ("claude-haiku", "tiny", "any", None)] == [
        "tiny",
        "tiny",
        "small",
        "small",
    ]
    assert models.names == ["tiny", "small", "claude-sonnet", "claude-haiku"]
    with pytest.raises(Problem, match=r"claude-haiku.*--alias NAME=MODEL.*--serve-any-name") as no:
        models.named("claude-opus")
    assert (no.value.status, no.value.param) == (404, "model")


def test_any_name_may_mean_the_last_used_model() -> None:
    models = ServedModels(MODELS, ALIASES, any_name=True)
    assert models.named("gpt-5").name == "small"
    assert models.named("claude-sonnet").name == "tiny"


@pytest.mark.parametrize("asked", ["any", "dummy", "", None])
def test_a_response_repeats_the_name_that_was_asked_for(asked: str | None) -> None:
    assert answer_name("tiny", "claude-sonnet") == "claude-sonnet"
    assert answer_name("tiny", asked) == "tiny"


@pytest.mark.parametrize("alias", ["tiny", "=tiny", "a=", "a=none", "tiny=tiny", "b=tiny"])
def test_an_alias_that_names_no_model_is_refused_before_anything_is_loaded(alias: str) -> None:
    asked = ["serve", "--alias", "b=second", "--model", "second=tiny", "--alias", alias]
    with pytest.raises(RequestError, match="models are tiny, second"):
        check(parser().parse_args(asked))
