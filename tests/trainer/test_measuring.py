"""`dj.measure`: acceptance by position, kind of prompt and context, with intervals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine.result import Result, Stats
from dflash_jax.engine.state_machine.trace import RoundTrace
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target
from dflash_jax.trainer.measuring import Estimate, estimates, measurement

TARGET = tiny_target(num_layers=2, vocab_size=96)
DRAFTER = tiny_drafter(
    TARGET, target_layer_ids=(0,), num_layers=1, windows=(None,), causal=(False,)
)


def answer(prompt: int, rounds: list[tuple[int, int]], tail: int = 0) -> Result:
    """Return a traced answer of rounds (verified drafts, accepted ones) and plain steps."""
    first = RoundTrace((1,), ("target",), prefill=True)
    drafted = [
        RoundTrace((1,) * (kept + 1), ("target",) * (kept + 1), proposed=count, accepted=kept)
        for count, kept in rounds
    ]
    plain = [RoundTrace((1,), ("target",))] * tail
    return Result([], None, "length", Stats(prompt_tokens=prompt), trace=(first, *drafted, *plain))


def test_rounds_are_counted_by_position_among_those_verified_and_by_kind_and_context() -> None:
    results = [answer(126, [(3, 3), (3, 0), (1, 1)]), answer(10, [(3, 2)], tail=4), answer(5, [])]
    found = measurement(["chat", "code", "code"], results, 3)
    assert found.total.prompts == 2
    assert found.total.rounds == 4
    assert found.total.length.value == (4 + 1 + 2 + 3) / 4
    assert [x.value for x in found.total.positions] == [3 / 4, 2 / 3, 1 / 3]
    assert {kind: x.rounds for kind, x in found.kinds.items()} == {"chat": 3, "code": 1}
    # The first round of the first prompt begins after 127 tokens, the second after 131.
    assert {name: x.rounds for name, x in found.contexts.items()} == {"0-127": 2, "128-255": 2}
    assert found.kinds["code"].length == Estimate(3.0, None, None)
    assert "chat" in str(found)


def test_intervals_come_from_prompts_drawn_again_and_hold_the_mean() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        rounds = rng.integers(5, 20, 30)
        tokens = rounds * rng.normal(3.0, 1.0, 30)
        [found] = estimates(np.stack([tokens, rounds], axis=1))
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 3.0 <= found.high
    assert inside >= 85
    [alike] = estimates(np.array([[6.0, 2.0]] * 4))
    assert alike == Estimate(3.0, 3.0, 3.0)


def test_what_was_never_seen_has_no_figure() -> None:
    found = measurement(["chat", "ids"], [answer(5, [(1, 1)]), answer(5, [])], 3)
    assert found.kinds["ids"].length == Estimate(None, None, None)
    assert [x.value for x in found.total.positions] == [1.0, None, None]
    assert json.loads(json.dumps(found.to_json()))["kinds"]["ids"]["rounds"] == 0
    assert "-" in str(found)
    assert found.plot().axes
    empty = measurement(["ids"], [answer(5, [])], 3)
    assert empty.contexts == {}
    assert empty.plot().axes


@pytest.fixture(scope="module")
def engine() -> dj.Engine:
    return random_engine(TARGET, DRAFTER, dj.Plan(max_length=96, block=4, chunk=16), seed=1)


def test_a_measurement_is_of_whole_blocks_and_leaves_the_engine_as_it_was(
    engine: dj.Engine, tmp_path: Path
) -> None:
    engine.measures_drafting = True
    before = engine.core.meter.value
    prompts = [[5, 6, 7], [9, 8]]
    found = dj.measure(engine, {"some": prompts, "more": [[1, 2]]}, max_tokens=12, ignore_eos=True)
    assert engine.measures_drafting
    assert engine.core.meter.value is before
    engine.measures_drafting = False
    results = engine.generate_many([*prompts, [1, 2]], max_tokens=12, ignore_eos=True)
    lengths = [n for result in results for n in result.stats.acceptance_lengths]
    assert found.total.rounds == len(lengths)
    assert found.total.length.value == pytest.approx(np.mean(lengths))
    assert found.kinds.keys() == {"some", "more"}
    found.plot(tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").stat().st_size > 1000


def test_prompts_may_be_lines_of_a_file(engine: dj.Engine, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"ids": [4, 5]}\n{"ids": [6]}\n')
    assert dj.measure(engine, path, max_tokens=4, ignore_eos=True).kinds["ids"].prompts <= 2


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, RequestError, r"prompts is \[\]; expected some prompts"),
        ({"chat": []}, {}, RequestError, "expected some prompts"),
        (5, {}, RequestError, "prompts is 5; expected a list, a file, or lists by kind"),
        (b"x", {}, RequestError, "prompts is b'x'; expected a list"),
        ([5], {}, ConfigError, "prompt 0 cannot be used"),
        ({"chat": [[1], [-1]]}, {}, ConfigError, "prompt 1 cannot be used .-1 is no token id"),
        ("missing.jsonl", {}, ConfigError, "there is no data at missing.jsonl"),
        ([[96]], {}, RequestError, "out of range"),
        (["Hello"], {}, RequestError, "tokenizer"),
        ([[1]], {"speculative": False}, RequestError, "nothing is drafted"),
        ([[1]], {"max_tokens": -1}, RequestError, "max_tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    engine: dj.Engine, prompts: Any, options: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        dj.measure(engine, prompts, **options)


def test_engines_without_a_drafter_are_refused() -> None:
    with pytest.raises(RequestError, match="nothing is drafted"):
        dj.measure(random_engine(TARGET, None, dj.Plan(max_length=96)), [[1]])
    with pytest.raises(RequestError, match="engine is a str; expected"):
        dj.measure("tiny", [[1]])  # pyrefly: ignore
