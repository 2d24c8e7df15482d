"""With recovery off, no rule runs, and outputs are those of an engine that has none."""

import itertools
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF, announcements, controller, floor, guards
from dflash_jax.engine.state_machine.output_reader import OutputReader
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.graph.state import OutputColumn
from dflash_jax.testing import force_acceptance, set_script
from tests.soak.recovery_events import END, ID, SIZE, WALKS, make_engine

BLOCK, LENGTH = 4, 24
STARTS = [walk[0] for walk in WALKS if walk[0].startswith("<")]
RULES: list[tuple[Any, str]] = [
    (controller, "RULES"),
    (announcements, "read_ending"),
    (floor, "read_ending"),
    (guards, "Guard"),
    (OutputReader, "text"),
    (OutputReader, "calls"),
    (OutputReader, "ended"),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine whose programs report the odds of calls, as they do by default."""
    return make_engine(BLOCK)


@pytest.fixture(scope="module")
def without() -> Engine:
    """Return an engine whose programs have no place for recovery."""
    return make_engine(BLOCK, report_tool_call_margin=False)


@pytest.fixture
def no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every rule of recovery raise an error."""
    for owner, name in RULES:

        def refuse(*_: Any, name: str = name, **__: Any) -> None:
            raise AssertionError(f"{name} was used although recovery is off")

        monkeypatch.setattr(owner, name, refuse)


def walked(start: str) -> tuple[list[int], str]:
    """Return the target's tokens up to the first end token, and the reason for the end."""
    following = {a: b for walk in WALKS for a, b in itertools.pairwise(walk)}
    tokens = [following[start]]
    while tokens[-1] != END and len(tokens) < LENGTH:
        tokens.append(following[tokens[-1]])
    return [ID[t] for t in tokens], "stop" if tokens[-1] == END else "length"


@pytest.mark.parametrize("recovery", [None, OFF])
@pytest.mark.usefixtures("no_rules")
def test_no_rule_runs_and_the_tokens_are_those_of_the_target(
    engine: Engine, recovery: dj.Recovery | None
) -> None:
    for start in STARTS:
        prompt, (tokens, reason) = [ID[start]], walked(start)
        set_script(engine, force_acceptance([*prompt, *tokens], 1, (2, 0, 3), SIZE))
        options: dict[str, Any] = {"max_tokens": LENGTH, "recovery": recovery}
        for speculative in (True, False):
            found = engine.generate(prompt, speculative=speculative, **options)
            assert (found.token_ids, found.finish_reason) == (tokens, reason)
            assert not found.stats.recovery


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_rules")
def test_draws_are_those_of_programs_without_recovery(engine: Engine, without: Engine) -> None:
    drawn = set()
    for made in (engine, without):
        set_script(made, list(range(SIZE)))
    for speculative in (True, False):
        for seed, start in enumerate(STARTS):
            options: dict[str, Any] = {"temperature": 2.5, "seed": seed, "max_tokens": LENGTH}
            options["speculative"] = speculative
            first, second = (made.generate([ID[start]], **options) for made in (engine, without))
            assert first.token_ids == second.token_ids
            assert first.finish_reason == second.finish_reason
            drawn.add(tuple(first.token_ids))
    assert len(drawn) == len(STARTS)  # drafted or not
    # Their programs have neither its inputs nor its outputs.
    key = engine.graph.key(Step.PLAIN, Variant.SAMPLED)
    for made, odds in ((engine, 1), (without, 0)):
        assert (made.core.scheduler.rules().opening is None) == (not odds)
        columns = 1 + len(OutputColumn) + odds
        assert f"tensor<1x{columns}xi32>" in made.core.runner.executables[key].stablehlo
