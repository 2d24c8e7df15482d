"""Recovery on the real engine: the device applies the effects of the state machine, bit for bit."""

import dataclasses
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

import dflash_jax as dj
from dflash_jax.engine import request as requests
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF, floor
from dflash_jax.engine.state_machine.announcements import Cue
from dflash_jax.engine.state_machine.output_vocabulary import OutputVocabulary
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.errors import RequestError
from dflash_jax.graph import Graph
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.testing import set_script
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES

PROMPT = [5, 4, 3, 2, 1]


@pytest.fixture(scope="module")
def truth(tiny: Engine) -> list[int]:
    """The target's own continuation of PROMPT."""
    return tiny.generate(PROMPT, max_tokens=60, speculative=False).token_ids


@pytest.mark.sample("False")
@pytest.mark.parametrize("speculative", [True, False])
def test_an_output_has_at_least_min_tokens(
    tiny: Engine, truth: list[int], speculative: bool
) -> None:
    stop = truth[4]
    options = {"stop_token_ids": [stop], "max_tokens": 30, "speculative": speculative}
    assert tiny.generate(PROMPT, **options).finish_reason == "stop"
    found = tiny.generate(PROMPT, min_tokens=8, **options)
    assert stop not in found.token_ids[:8]
    assert found.stats.recovery["min_tokens"] >= 1
    # Compare with a forward pass: the best token other than the end token, eight times.
    model = dj.TargetModel(tiny.graph.config, tiny.params["target"], "float32")
    ids = [*PROMPT, *found.token_ids[:7]]
    logits = np.array(model.forward(np.array([ids])).logits)[0, len(PROMPT) - 1 :]
    logits[:, stop] = -np.inf
    assert found.token_ids[:8] == logits.argmax(axis=1).tolist()
    # The output continues as after a prompt that ends there.
    rest = tiny.generate([*PROMPT, *found.token_ids[:8]], **options | {"max_tokens": 22})
    assert found.token_ids[8:] == rest.token_ids


def test_impossible_min_tokens_are_refused(tiny: Engine) -> None:
    for options in ({"min_tokens": 9, "max_tokens": 8}, {"min_tokens": -1}, {"min_tokens": "4"}):
        with pytest.raises(RequestError, match="min_tokens is"):
            tiny.generate(PROMPT, **options)
    with pytest.raises(RequestError, match="drop one of them"):
        tiny.generate(PROMPT, min_tokens=2, structured={"regex": "a"})


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that sets the meaning of tokens, as there is no tokenizer."""

    def use(**fields: Any) -> None:
        monkeypatch.setattr(requests, "vocabulary_of", lambda *_: OutputVocabulary(**fields))

    return use


def recovery(**changes: Any) -> dj.Recovery:
    fields = {field.name: getattr(OFF, field.name) for field in dataclasses.fields(OFF)}
    return dj.Recovery(**fields | changes)


def continued(engine: Engine, ids: list[int], n: int) -> list[int]:
    """Return the output after these ids as a prompt."""
    return engine.generate(ids, max_tokens=n, speculative=False).token_ids


@pytest.mark.exhaustive
def test_S33_recovery_without_an_occasion_changes_nothing(tiny: Engine, truth: list[int]) -> None:
    for settings in (None, OFF, dj.Recovery()):
        for options in ({}, {"temperature": 0.9, "seed": 3}):
            plain = tiny.generate(PROMPT, max_tokens=20, **options)
            found = tiny.generate(PROMPT, max_tokens=20, recovery=settings, **options)
            assert found.token_ids == plain.token_ids
            assert found.finish_reason == plain.finish_reason
            assert not found.stats.recovery


@pytest.mark.parametrize("speculative", [True, False])
def test_S26_the_floor_takes_the_next_best_token_of_the_same_logits(
    tiny: Engine, truth: list[int], speculative: bool
) -> None:
    stop = truth[4]
    first = truth.index(stop)
    options = {"stop_token_ids": [stop], "max_tokens": 12, "speculative": speculative}
    settings = recovery(min_tokens=12)
    found = tiny.generate(PROMPT, recovery=settings, **options)
    assert found.finish_reason == "length"
    assert stop not in found.token_ids
    assert found.stats.recovery["min_tokens"] >= 1
    # Compare with the logits of a separate forward pass.
    model = dj.TargetModel(tiny.graph.config, tiny.params["target"], "float32")
    ids = np.array([[*PROMPT, *truth[:first]]])
    order = np.argsort(-np.asarray(model.forward(ids).logits)[0, -1]).tolist()
    assert order[0] == stop
    assert found.token_ids[: first + 1] == [*truth[:first], order[1]]


def test_S27_the_floor_acts_equally_in_every_mode_and_row(tiny3: Engine) -> None:
    settings = recovery(min_tokens=20)
    prompts = [PROMPT, [7], list(range(20)), [9, 9]]
    stops = [tiny3.generate(p, max_tokens=4).token_ids[-1] for p in prompts]
    options = {"stop_token_ids": stops, "max_tokens": 25, "recovery": settings}
    fast = tiny3.generate_many(prompts, **options)
    slow = [tiny3.generate(p, **options, speculative=False) for p in prompts]
    assert [r.token_ids for r in fast] == [r.token_ids for r in slow]
    assert all(r.stats.recovery["min_tokens"] for r in fast)


def test_S29_a_replacement_is_sampled_with_the_same_key(tiny: Engine) -> None:
    free = tiny.generate(PROMPT, max_tokens=16, temperature=0.8, seed=5).token_ids
    settings = recovery(min_tokens=16)
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "recovery": settings}
    once = tiny.generate(PROMPT, stop_token_ids=[free[3]], **options)
    again = tiny.generate(PROMPT, stop_token_ids=[free[3]], **options)
    at = free.index(free[3])
    assert once.token_ids == again.token_ids
    assert once.token_ids[:at] == free[:at]
    assert free[3] not in once.token_ids


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("speculative", [True, False])
def test_S16_a_forced_call_leaves_the_state_of_a_prompt_that_contains_it(
    tiny: Engine, truth: list[int], vocabulary: Any, length: int, speculative: bool
) -> None:
    """Forced lengths around the block size of 4; the output continues as after a prompt."""
    stop = truth[6]
    first = truth.index(stop)
    prefix = tuple(range(200, 200 + length))
    vocabulary(text=lambda ids: ":", calls=(prefix,))
    settings = recovery(floor=50, tool_prefix=True)
    found = tiny.generate(
        PROMPT, stop_token_ids=[stop], max_tokens=45, recovery=settings, speculative=speculative
    )
    output = [*truth[:first], *prefix]
    assert found.token_ids[: len(output)] == output
    assert found.stats.recovery["tool_prefix"] == 1
    rest = found.token_ids[len(output) :]
    assert rest
    assert rest == continued(tiny, [*PROMPT, *output], 45)[: len(rest)]
    if speculative:
        assert found.stats.plain_steps == 0  # taps were captured, so drafting continues


NAMES = (
    (200, 201, 202, 203, 204, 205, 206),
    (200, 201, 210, 211, 212),
    (200, 201, 210, 220, 221, 222, 223, 224, 225),
    (200, 201, 230),
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_forced_call_names_the_declared_tool_with_the_largest_logits(
    tiny: Engine, truth: list[int], vocabulary: Any, temperature: float
) -> None:
    """In plain decoding and in blocks of every size, compared with logits of a forward pass."""
    vocabulary(text=lambda ids: ":", calls=NAMES)
    options: dict[str, Any] = {"max_tokens": 45, "temperature": temperature, "seed": 9}
    if temperature:
        options["speculative"] = False
    free = tiny.generate(PROMPT, **options).token_ids
    options |= {"stop_token_ids": [free[6]], "recovery": recovery(floor=50, tool_prefix=True)}
    found = tiny.generate(PROMPT, **options)
    output = found.token_ids
    at = output.index(200)
    [name] = [ids for ids in NAMES if tuple(output[at : at + len(ids)]) == ids]
    assert found.stats.recovery["tool_prefix"] == 1
    model = dj.TargetModel(tiny.graph.config, tiny.params["target"], "float32")
    logits = np.asarray(model.forward(np.array([[*PROMPT, *output]])).logits)[0]
    for place in range(len(name)):
        possible = {ids[place] for ids in NAMES if ids[:place] == name[:place]}
        row = logits[len(PROMPT) + at + place - 1]
        assert name[place] == max(possible, key=lambda i, row=row: row[i])
    again = continued(tiny, [*PROMPT, *output[: at + len(name)]], 45)
    if temperature:
        assert tiny.generate(PROMPT, **options).token_ids == output
        return
    assert output[at + len(name) :] == again[: len(output) - at - len(name)]
    for more in ({"speculative": False}, *({"block_size": n} for n in range(1, 5))):
        other = tiny.generate(PROMPT, **options, **more)
        assert other.token_ids == output
        assert other.stats.recovery == found.stats.recovery


@pytest.mark.parametrize("step", [0, 1])
def test_R12_a_failed_step_while_a_tool_is_chosen_changes_no_name(
    tiny: Engine, truth: list[int], vocabulary: Any, step: int
) -> None:
    vocabulary(text=lambda ids: ":", calls=NAMES)
    options: dict[str, Any] = {
        "stop_token_ids": [truth[6]],
        "max_tokens": 45,
        "recovery": recovery(floor=50, tool_prefix=True),
    }
    wanted = tiny.generate(PROMPT, **options)
    assert wanted.stats.plain_steps > step  # steps that choose; all others draft
    found = failing(tiny, Step.PLAIN, {step}).generate(PROMPT, **options)
    assert found.token_ids == wanted.token_ids
    assert found.stats.recovery == wanted.stats.recovery + Counter(rebuilt=1)


@pytest.mark.parametrize("speculative", [True, False])
def test_K1_K2_a_thought_is_closed_where_its_budget_ends(
    tiny: Engine, truth: list[int], vocabulary: Any, speculative: bool
) -> None:
    syntax = SYNTAXES["hermes"]
    close = (210, 211, 212, 213, 214, 215)
    vocabulary(text=lambda ids: "<think>", syntax=syntax, close=close)
    settings = recovery(answer_reserve=20)
    found = tiny.generate(PROMPT, max_tokens=31, recovery=settings, speculative=speculative)
    output = [*truth[:11], *close]
    assert found.token_ids[:17] == output
    assert found.token_ids[17:] == continued(tiny, [*PROMPT, *output], 14)
    assert found.finish_reason == "length"


def test_E3_an_empty_answer_is_confirmed_without_a_step(tiny: Engine, truth: list[int]) -> None:
    settings = recovery(empty_retry=True)
    found = tiny.generate(PROMPT, max_tokens=9, stop_token_ids=truth[:1], recovery=settings)
    assert found.token_ids == truth[:1]
    assert found.stats.fallbacks == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}
    assert found.stats.rounds == found.stats.plain_steps == 0


def test_E5_the_retry_starts_from_the_state_after_the_prompt(
    tiny: Engine, truth: list[int], vocabulary: Any
) -> None:
    vocabulary(hidden=frozenset(truth[:3]))
    assert truth[3] not in truth[:3]
    settings = recovery(empty_retry=True)
    options = {"max_tokens": 9, "stop_token_ids": [truth[3]], "recovery": settings}
    stream = tiny.submit(PROMPT, **options)
    pieces = [piece.token_ids for piece in stream]
    assert [i for ids in pieces for i in ids] == truth[:4]  # held, then emitted once
    assert stream.result().stats.fallbacks == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}
    assert tiny.generate(PROMPT, max_tokens=20).token_ids == truth[:20]


def test_in_flight_results_are_not_part_of_the_retry(
    tiny: Engine, truth: list[int], vocabulary: Any
) -> None:
    """A loop of hidden tokens ends while a step is in flight; its results are discarded."""
    vocabulary(hidden=frozenset(truth))
    twice = next(i for i in range(1, 60) if truth[i] == truth[i - 1])
    settings = recovery(empty_retry=True, repeat_limit=2)
    found = tiny.generate(PROMPT, max_tokens=60, recovery=settings)
    assert found.token_ids == truth[: twice + 1]
    assert found.stats.fallbacks == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}
    assert found.stats.recovery == {"repeat": 1}


@pytest.mark.sample("floor")
@pytest.mark.parametrize("rule", ["repeat", "runaway", "floor"])
def test_recovery_statistics_count_the_final_answer_in_every_mode(
    tiny: Engine, truth: list[int], vocabulary: Any, rule: str
) -> None:
    """An invisible answer is decoded up to three times with drafting, once without."""
    vocabulary(hidden=frozenset(range(251)))
    twice = next(i for i in range(1, 60) if truth[i] == truth[i - 1])
    options: dict[str, Any] = {"max_tokens": 60}
    if rule == "repeat":
        changes: dict[str, Any] = {"repeat_limit": 2}
    elif rule == "runaway":
        changes = {"loops": True, "loop_tokens": 2}
        options |= {"max_tokens": 40, "logit_bias": {7: 100.0}}
    else:
        changes = {"floor": twice}
        options |= {"stop_token_ids": truth[2:4]}
    options["recovery"] = recovery(empty_retry=True, **changes)
    plain = tiny.generate(PROMPT, speculative=False, **options)
    assert not plain.stats.fallbacks
    assert plain.stats.recovery[rule] >= 1
    for size in range(1, 5):
        found = tiny.generate(PROMPT, block_size=size, **options)
        assert found.token_ids == plain.token_ids
        assert found.stats.recovery == plain.stats.recovery
        assert found.stats.fallbacks["empty_retry"] == (size > 1)


def test_tokens_after_the_stop_string_are_not_counted(scripted: Engine, truth: list[int]) -> None:
    """A block may extend past the stop string."""
    vocab = {chr(256 + i): i for i in range(scripted.graph.config.vocab_size)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    made = Engine(
        Graph(scripted.graph.pair, scripted.plan),
        scripted.params,
        tokenizer=Tokenizer(core, None, {}),
    )
    made.core.runner.compiled.executables = scripted.core.runner.executables
    new = [i for i in range(1, 40) if truth[i] not in truth[:i]]
    at = next(i for i in new if i % 4 and i + 1 in new)  # both in one block of four
    set_script(made, [*PROMPT, *truth])
    options: dict[str, Any] = {"max_tokens": 50, "min_tokens": 50, "stop": chr(256 + truth[at])}
    options["stop_token_ids"] = [truth[at + 1]]
    for speculative in (False, True):
        found = made.generate(PROMPT, speculative=speculative, **options)
        assert found.token_ids == truth[: at + 1]
        assert found.stats.recovery == {}


def test_held_tokens_keep_their_log_probabilities(
    tiny: Engine, truth: list[int], vocabulary: Any
) -> None:
    vocabulary(hidden=frozenset(truth[:3]))
    options = {"max_tokens": 9, "logprobs": 2, "speculative": False}
    free = tiny.generate(PROMPT, **options)
    held = tiny.generate(PROMPT, recovery=recovery(empty_retry=True), **options)
    assert held.token_ids == free.token_ids == truth[:9]
    fast = tiny.submit(PROMPT, max_tokens=9, logprobs=2, recovery=recovery(empty_retry=True))
    first = next(iter(fast))
    assert len(first.token_ids) > 3  # the hidden ones are emitted with the first visible one
    assert held.logprobs == free.logprobs
    assert list(first.logprobs) == (free.logprobs or [])[: len(first.token_ids)]
    fast.close()


def test_tokens_after_held_forced_tokens_keep_their_log_probabilities(
    tiny: Engine, truth: list[int], vocabulary: Any
) -> None:
    """A thought is closed while nothing is visible yet; the model decides the tokens after it."""
    close = (7, 8)
    vocabulary(
        close=close,
        hidden=frozenset((*truth[:3], *close)),
        syntax=SYNTAXES["qwen_xml"],
        inside_thought=True,
    )
    keep = recovery(empty_retry=True, answer_reserve=7)
    result = tiny.generate(PROMPT, max_tokens=10, logprobs=0, recovery=keep)
    assert result.token_ids[:5] == [*truth[:3], *close]
    known = [x.logprob is not None for x in result.logprobs or []]
    assert known == [i not in (3, 4) for i in range(10)]


@pytest.mark.exhaustive
def test_answers_of_one_prompt_are_recovered_separately(tiny3: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 15, "temperature": 1.0, "seed": 6}
    free = tiny3.generate_many([PROMPT], n=2, **options)
    stop = free[0].token_ids[4]
    options |= {"stop_token_ids": [stop], "recovery": recovery(min_tokens=15)}
    both = tiny3.generate_many([PROMPT], n=2, **options)
    alone = [tiny3.generate(PROMPT, **options | {"seed": seed}) for seed in (6, 7)]
    assert [r.token_ids for r in both] == [r.token_ids for r in alone]
    assert both[0].stats.recovery["min_tokens"]
    cell = dj.CancelCell()
    handles = tiny3.enqueue(tiny3.prepare(PROMPT, n=3, max_tokens=30, cancel=cell))
    tiny3.advance()
    cell.cancel("shutdown")
    tiny3.advance()
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 3
    assert tiny3.core.active == 0


def test_G2_a_run_of_equal_tokens_ends_at_its_limit(tiny: Engine, truth: list[int]) -> None:
    twice = next((i for i in range(1, 60) if truth[i] == truth[i - 1]), None)
    assert twice, "expected a repeated token in the output of the random target"
    for speculative in (True, False):
        found = tiny.generate(
            PROMPT, max_tokens=60, recovery=recovery(repeat_limit=2), speculative=speculative
        )
        assert found.token_ids == truth[: twice + 1]
        assert found.finish_reason == "length"
        assert found.stats.recovery == {"repeat": 1}


@pytest.mark.parametrize("when", [0, 1, 3])
def test_C5_C7_a_cell_cancels_a_request_in_any_phase(tiny: Engine, when: int) -> None:
    cell = dj.CancelCell()
    handle = tiny.submit([i % 250 for i in range(100)], max_tokens=20, cancel=cell)
    for _ in range(when):
        tiny.advance()
    cell.cancel("disconnect")
    fed = handle.num_computed
    tiny.advance()
    assert handle.num_computed == fed <= 16 * when < 100
    assert handle.result().finish_reason == "cancelled"
    assert handle.result().token_ids == []
    assert handle.stats.recovery == {"cancelled_disconnect": 1}
    assert not tiny.core.active
    assert not tiny.core.queued


def test_C13_a_cancellation_does_not_affect_the_next_request(
    tiny: Engine, truth: list[int]
) -> None:
    cell = dj.CancelCell()
    handle = tiny.submit([9] * 60, max_tokens=40, cancel=cell)
    while len(handle.token_ids) < 5:
        tiny.advance()
    cell.cancel()
    assert tiny.generate(PROMPT, max_tokens=20).token_ids == truth[:20]
    assert handle.done


def test_C9_generate_can_be_cancelled(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, turns, advance = dj.CancelCell(), iter(range(100)), tiny.advance

    def counted() -> None:
        if next(turns) == 2:
            cell.cancel("disconnect")
        advance()

    monkeypatch.setattr(tiny, "advance", counted)
    found = tiny.generate(PROMPT, max_tokens=100, cancel=cell)
    assert found.finish_reason == "cancelled"
    assert 0 < len(found.token_ids) < 100
    assert next(turns) == 3  # the turn that noticed it was the last


def test_C19_a_hundred_cancellations_leave_no_request(tiny3: Engine) -> None:
    rng = random.Random(5)
    handles = []
    for _ in range(100):
        prompt = [rng.randrange(251) for _ in range(rng.randint(1, 40))]
        cell = dj.CancelCell()
        handles.append(tiny3.submit(prompt, max_tokens=60, cancel=cell))
        for _ in range(rng.randint(0, 3)):
            tiny3.advance()
        cell.cancel("disconnect") if rng.random() < 0.5 else handles[-1].close()
    while tiny3.core.busy:
        tiny3.advance()
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}
    assert (tiny3.core.active, tiny3.core.queued, len(tiny3.core.in_flight)) == (0, 0, 0)
    assert tiny3.generate(PROMPT, max_tokens=5).finish_reason == "length"


def test_C18_a_deadline_ends_the_request_with_its_output_so_far(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = tiny.submit(PROMPT, max_tokens=40, recovery=recovery(deadline_s=5))
    while len(handle.token_ids) < 5:
        tiny.advance()
    monkeypatch.setattr(tiny.core.inbox, "clock", lambda: time.perf_counter() + 5)
    tiny.advance()
    assert handle.result().finish_reason == "length"
    assert 5 <= len(handle.token_ids) < 40
    assert handle.stats.recovery == {"deadline": 1}


def test_L1_L2_events_are_logged_only_when_recovery_is_on(
    tiny: Engine, truth: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dflash_jax.recovery")
    tiny.generate(PROMPT, max_tokens=5, stop_token_ids=truth[:1])
    assert not caplog.records
    settings = recovery(empty_retry=True, log_directory=str(tmp_path))
    tiny.generate(PROMPT, max_tokens=5, stop_token_ids=truth[:1], recovery=settings)
    assert [r.dflash["event"] for r in caplog.records] == [
        "empty_retry",
        "empty_retry_confirmed_eos",
    ]
    assert set(caplog.records[0].dflash) == {"event", "request", "prompt_tokens", "output_tokens"}
    assert len((tmp_path / "recovery.jsonl").read_text().splitlines()) == 2


@pytest.mark.exhaustive
def test_decode_modes_change_only_by_a_measured_cost(tiny: Engine, truth: list[int]) -> None:
    engine = Engine(Graph(tiny.graph.pair, tiny.plan), tiny.params)
    engine.core.runner.compiled.executables = tiny.core.runner.executables
    engine.time_drafting()
    assert engine.core.meter.value.at(0) > 0
    engine.core.meter.use(BreakEven.constant(3.9))  # the random drafter commits fewer tokens
    found = engine.generate(PROMPT, max_tokens=60)
    assert found.token_ids == truth
    assert found.stats.fallbacks["below_break_even"] >= 1
    assert found.stats.plain_steps > 10
    assert 1 <= engine.core.acceptance.length < 3.9
    short = [engine.generate(PROMPT, max_tokens=20) for _ in range(3)]
    assert all(again.token_ids == truth[:20] for again in short)
    assert [again.stats.rounds for again in short].count(
        0
    ) >= 2  # one may draft whatever the history
    sampled = {"max_tokens": 60, "temperature": 0.5, "ignore_eos": True}
    seeded = engine.generate(PROMPT, seed=1, **sampled)
    assert seeded.stats.plain_steps > 10
    drawn = engine.generate(PROMPT, seed=1, speculative=False, **sampled)
    assert seeded.token_ids == drawn.token_ids
    unseeded = engine.generate_many([PROMPT] * 4, **sampled)
    assert sum(x.stats.plain_steps for x in unseeded) > 100


FAILURE = jax.errors.JaxRuntimeError("INTERNAL: made to fail")


def failing(engine: Engine, step: Step, calls: set[int], error: BaseException = FAILURE) -> Engine:
    """Return an engine in which some calls of one program fail after their state was donated."""
    made = Engine(Graph(engine.graph.pair, engine.plan), engine.params)
    number = iter(range(10_000))
    keys = [key for key in engine.core.runner.executables if key.step == step]

    def call(key: ProgramKey, *arguments: Any) -> Any:
        found = engine.core.runner.executables[key](*arguments)
        if next(number) in calls:
            raise error  # the donated state is gone
        return found

    failing = {key: functools.partial(call, key) for key in keys}
    made.core.runner.compiled.executables = engine.core.runner.executables | failing
    return made


@pytest.mark.parametrize(
    ("step", "calls"), [(Step.SPECULATIVE, {0}), (Step.SPECULATIVE, {4}), (Step.PREFILL, {1})]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_R12_after_a_failed_step_every_row_continues_at_its_position(
    tiny3: Engine, step: Step, calls: set[int], temperature: float
) -> None:
    prompts = [PROMPT, [7] * 30, list(range(20)), [9, 9]]
    options = {"max_tokens": 25, "temperature": temperature, "seed": 4}
    wanted = [r.token_ids for r in tiny3.generate_many(prompts, **options)]
    found = failing(tiny3, step, calls).generate_many(prompts, **options)
    assert [r.token_ids for r in found] == wanted
    assert sum(r.stats.recovery["rebuilt"] for r in found) == 3


def test_repeated_device_failures_end_requests_with_a_reason(tiny: Engine) -> None:
    engine = failing(tiny, Step.SPECULATIVE, set(range(2, 100)))
    with pytest.raises(dj.ComputeError, match=r"failed twice .*INTERNAL: made to fail"):
        engine.generate(PROMPT, max_tokens=40)
    assert not engine.core.active


@pytest.mark.parametrize("lost", ["state", "output", "row"])
def test_the_engine_continues_after_an_interrupt_in_a_turn(
    tiny: Engine, truth: list[int], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Ctrl-C before the state is returned, while output is processed, or while a row is freed."""
    stops = iter([KeyboardInterrupt])

    def stop(*_: Any) -> None:
        for error in stops:
            raise error

    engine = failing(tiny, Step.SPECULATIVE, {2} if lost == "state" else set(), KeyboardInterrupt())
    handle = engine.submit(PROMPT, max_tokens=20)
    if lost == "output":
        monkeypatch.setattr(handle.sequence.output, "emit", stop)
    elif lost == "row":
        monkeypatch.setattr(engine.core.scheduler, "remove", stop)
    with pytest.raises(KeyboardInterrupt):
        finish(engine, handle)
    monkeypatch.undo()
    if lost == "output":
        finish(engine, handle)
        with pytest.raises(dj.ComputeError, match="send the request again"):
            handle.result()
    else:
        assert finish(engine, handle) == truth[:20]
    again = engine.submit(PROMPT, max_tokens=20)
    assert finish(engine, again) == truth[:20]
    assert not engine.core.busy


def test_an_interrupt_where_a_turn_begins_or_ends_releases_the_lock(
    tiny: Engine, truth: list[int]
) -> None:
    """Python handles signals where a function begins; a notebook keeps the traceback."""
    handle = tiny.submit(PROMPT, max_tokens=20)
    kept: list[BaseException] = []
    called: dict[Any, None] = {}  # functions that a turn calls directly

    def trace(frame: Any, event: str, _: Any) -> None:
        if frame.f_back.f_code is EngineCore._alone.__code__ and frame.f_code not in called:
            called[frame.f_code] = None
            raise KeyboardInterrupt

    while len(kept) == len(called):
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            tiny.advance()
        except KeyboardInterrupt as error:
            kept.append(error)
        else:
            break
        finally:
            sys.settrace(before)
        assert not tiny.core._turns.locked()
    assert len(kept) == len(called) >= 2
    assert finish(tiny, handle) == truth[:20]


def test_a_required_tool_that_was_not_declared_is_refused(tiny: Engine) -> None:
    with pytest.raises(RequestError, match="declared tools are: none"):
        tiny.generate(PROMPT, tool_choice={"type": "function", "function": {"name": "zzz"}})


def finish(engine: Engine, handle: Any) -> list[int]:
    """Return the output of a request; fail if it takes more than 300 turns."""
    for _ in range(300):
        if handle.done:
            return handle.token_ids
        engine.advance()
    handle.close()
    raise AssertionError("the request does not end")


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("rule", ["close", "prefix"])
def test_forced_tokens_that_end_with_a_stop_token_end_the_output(
    tiny: Engine, truth: list[int], vocabulary: Any, speculative: bool, rule: str
) -> None:
    """The row stops at a stop token on the device, so the host has to end the request."""
    end = truth[7]
    at = truth.index(end)
    assert 249 not in truth
    if rule == "close":
        vocabulary(text=lambda ids: "<think>", syntax=SYNTAXES["qwen_xml"], close=(250, 249),
              inside_thought=True)  # fmt: skip
        rules = recovery(answer_reserve=10)
    else:
        vocabulary(
            text=lambda ids: "Let me look:", syntax=SYNTAXES["qwen_xml"], calls=((250, 249),)
        )
        rules = recovery(floor=40, tool_prefix=True)
    handle = tiny.submit(
        PROMPT,
        max_tokens=30,
        stop_token_ids=[249, *([end] if rule == "prefix" else [])],
        speculative=speculative,
        recovery=rules,
    )
    found = finish(tiny, handle)
    assert handle.result().finish_reason == "stop"
    assert found == [*truth[: 20 if rule == "close" else at], 250, 249]


def test_a_thought_is_closed_after_a_call_forced_across_its_limit(
    tiny: Engine, scripted: Engine, vocabulary: Any
) -> None:
    """The call extends past the limit of the thought, which is closed after it."""
    prompt = [5, 4, 3]
    truth = tiny.generate(prompt, max_tokens=60).token_ids
    at = next(i for i in range(20, 30) if truth[i] not in truth[:i])
    vocabulary(
        text=lambda ids: "Now <think>: ",
        syntax=SYNTAXES["qwen_xml"],
        calls=((11, 12, 13, 14, 15, 16),),
        close=(21, 22),
    )
    rules = recovery(floor=200, tool_prefix=True, floor_in_thought=True, answer_reserve=60 - at - 3)
    stops = {"max_tokens": 60, "stop_token_ids": [truth[at]]}
    unclosed = dataclasses.replace(rules, answer_reserve=0)
    free = tiny.generate(prompt, recovery=unclosed, speculative=False, **stops).token_ids
    set_script(scripted, [*prompt, *free])  # drafts extend past the limit, too
    outputs = []
    for speculative in (False, True):
        handle = scripted.submit(
            prompt,
            max_tokens=60,
            recovery=rules,
            stop_token_ids=[truth[at]],
            speculative=speculative,
        )
        outputs.append(list(finish(scripted, handle)))
    assert outputs[0] == outputs[1]
    assert outputs[0][at : at + 8] == [11, 12, 13, 14, 15, 16, 21, 22]


LEAD, CALL = 198, 199
OPENED = (LEAD, CALL, 200, 201)


def log_odds(engine: Engine, ids: list[int], token: int, other: int) -> float:
    """Return the log-odds of two next tokens, from a separate forward pass."""
    model = dj.TargetModel(engine.graph.config, engine.params["target"], "float32")
    logits = np.asarray(model.forward(np.array([ids])).logits)[0, -1]
    return float(logits[token] - logits[other])


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("opening", [(LEAD, CALL), (LEAD, CALL, 200)])
def test_an_end_is_judged_by_the_odds_of_the_target(
    tiny: Engine,
    truth: list[int],
    vocabulary: Any,
    speculative: bool,
    accepted: bool,
    opening: tuple[int, ...],
) -> None:
    """Thresholds just above and just below the sum of the odds of all steps."""
    stop = truth[6]
    output = truth[: truth.index(stop)]
    vocabulary(text=lambda ids: "Let me look at it.", calls=(OPENED,), opening=opening)
    first = total = log_odds(tiny, [*PROMPT, *output], LEAD, stop)
    for at in range(1, len(opening)):
        lead = [*PROMPT, *output, *opening[:at]]
        total += log_odds(tiny, lead, opening[at], continued(tiny, lead, 1)[0])
    total -= floor.BARS[Cue.STRONG]
    least = total - 0.01 if accepted else total + 0.01
    settings = recovery(floor=50, tool_prefix=True, tool_call_threshold=least)
    options = {"stop_token_ids": [stop], "max_tokens": 45, "speculative": speculative}
    free = tiny.generate(PROMPT, logprobs=2, **options)
    found = tiny.generate(PROMPT, recovery=settings, **options)
    if accepted:
        assert found.token_ids[: len(output) + len(OPENED)] == [*output, *OPENED]
        assert found.stats.recovery == {"tool_prefix": 1}
        rest = found.token_ids[len(output) + len(OPENED) :]
        assert rest == continued(tiny, [*PROMPT, *output, *OPENED], 45)[: len(rest)]
        return
    assert first < 0 or len(opening) > 2  # probed: the first odds exceed the total
    assert found.token_ids == free.token_ids == [*output, stop]
    assert found.finish_reason == "stop"
    assert not found.stats.recovery
    with_logprobs = tiny.generate(PROMPT, recovery=settings, logprobs=2, **options)
    assert with_logprobs.token_ids == free.token_ids
    for got, wanted in zip(with_logprobs.logprobs or (), free.logprobs or (), strict=True):
        assert got.token_id == wanted.token_id
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_a_plan_without_odds_has_the_programs_without_them(tiny: Engine, vocabulary: Any) -> None:
    plan = dataclasses.replace(tiny.plan, report_tool_call_margin=False)
    without = Engine(Graph(tiny.graph.pair, plan), tiny.params)
    wanted = tiny.generate(PROMPT, max_tokens=20)
    found = without.generate(PROMPT, max_tokens=20)
    assert found.token_ids == wanted.token_ids
    assert "bitcast_convert" in tiny.core.runner.executables[tiny.graph.key(Step.PLAIN)].stablehlo
    assert (
        "bitcast_convert"
        not in without.core.runner.executables[tiny.graph.key(Step.PLAIN)].stablehlo
    )
    stop = wanted.token_ids[6]
    vocabulary(text=lambda ids: "w:", calls=(OPENED,), opening=(LEAD, CALL))
    settings = recovery(floor=50, tool_prefix=True)
    options = {"stop_token_ids": [stop], "max_tokens": 45, "recovery": settings}
    assert without.generate(PROMPT, **options).stats.recovery == {"tool_prefix": 1}
