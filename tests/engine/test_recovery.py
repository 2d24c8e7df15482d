"""Recovery on the real engine: the device does what the machine asks for, bit for bit."""

import dataclasses
import functools
import random
import sys
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
from dflash_jax.compiler.keys import ProgramKey, Step, Variant
from dflash_jax.engine import request as requests
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.recovery import OFF
from dflash_jax.engine.recovery.words import Words
from dflash_jax.errors import RequestError
from dflash_jax.testing import set_script
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES

PROMPT = [5, 4, 3, 2, 1]


@pytest.fixture(scope="module")
def truth(tiny: Engine) -> list[int]:
    """The target's own continuation of PROMPT."""
    return tiny.generate(PROMPT, max_tokens=60, speculative=False).token_ids


@pytest.mark.parametrize("speculative", [True, False])
def test_an_output_has_the_tokens_it_has_to_have_at_least(
    tiny: Engine, truth: list[int], speculative: bool
) -> None:
    stop = truth[4]
    options = {"stop_token_ids": [stop], "max_tokens": 30, "speculative": speculative}
    assert tiny.generate(PROMPT, **options).finish_reason == "stop"
    found = tiny.generate(PROMPT, min_tokens=8, **options)
    assert stop not in found.token_ids[:8]
    assert found.stats.recovery["min_tokens"] >= 1
    # By forward passes of their own: the best token but the end token, eight times.
    model = dj.TargetModel(tiny.target, tiny.params["target"], "float32")
    ids = [*PROMPT, *found.token_ids[:7]]
    logits = np.array(model.forward(np.array([ids])).logits)[0, len(PROMPT) - 1 :]
    logits[:, stop] = -np.inf
    assert found.token_ids[:8] == logits.argmax(axis=1).tolist()
    # Behind them nothing is different from a prompt that ends there.
    rest = tiny.generate([*PROMPT, *found.token_ids[:8]], **options | {"max_tokens": 22})
    assert found.token_ids[8:] == rest.token_ids


def test_a_minimum_that_cannot_be_kept_is_refused(tiny: Engine) -> None:
    for options in ({"min_tokens": 9, "max_tokens": 8}, {"min_tokens": -1}, {"min_tokens": "4"}):
        with pytest.raises(RequestError, match="min_tokens is"):
            tiny.generate(PROMPT, **options)
    with pytest.raises(RequestError, match="drop one of them"):
        tiny.generate(PROMPT, min_tokens=2, structured={"regex": "a"})


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets a test say what the tokens mean, as there is no tokenizer."""

    def use(**fields: Any) -> None:
        monkeypatch.setattr(requests, "words_of", lambda *_: Words(**fields))

    return use


def recovery(**changes: Any) -> dj.Recovery:
    fields = {name: getattr(OFF, name) for name in OFF.__dataclass_fields__}
    return dj.Recovery(**fields | changes)


def continued(engine: Engine, ids: list[int], n: int) -> list[int]:
    """What the engine says behind these ids, in blocks cut as they fall from a fresh prompt."""
    return engine.generate(ids, max_tokens=n, speculative=False).token_ids


def test_S33_recovery_that_finds_nothing_to_do_changes_nothing(
    tiny: Engine, truth: list[int]
) -> None:
    for settings in (None, OFF, dj.Recovery()):
        for options in ({}, {"temperature": 0.9, "seed": 3}):
            plain = tiny.generate(PROMPT, max_tokens=20, **options)
            found = tiny.generate(PROMPT, max_tokens=20, recovery=settings, **options)
            assert found.token_ids == plain.token_ids
            assert found.finish_reason == plain.finish_reason
            assert not found.stats.recovery


@pytest.mark.parametrize("speculative", [True, False])
def test_S26_the_floor_takes_the_next_best_token_of_the_same_numbers(
    tiny: Engine, truth: list[int], speculative: bool
) -> None:
    stop = truth[4]
    first = truth.index(stop)
    options = {"stop_token_ids": [stop], "max_tokens": 12, "speculative": speculative}
    settings = recovery(floor=12, below_floor="replace")
    found = tiny.generate(PROMPT, recovery=settings, **options)
    assert found.finish_reason == "length"
    assert stop not in found.token_ids
    assert found.stats.recovery["floor"] >= 1
    # By the logits of a forward pass of its own, not by another guess of the engine.
    model = dj.TargetModel(tiny.target, tiny.params["target"], "float32")
    ids = np.array([[*PROMPT, *truth[:first]]])
    order = np.argsort(-np.asarray(model.forward(ids).logits)[0, -1]).tolist()
    assert order[0] == stop
    assert found.token_ids[: first + 1] == [*truth[:first], order[1]]


def test_S27_the_floor_is_alike_in_every_lane_and_row(tiny3: Engine) -> None:
    settings = recovery(floor=20, below_floor="replace")
    prompts = [PROMPT, [7], list(range(20)), [9, 9]]
    stops = [tiny3.generate(p, max_tokens=4).token_ids[-1] for p in prompts]
    options = {"stop_token_ids": stops, "max_tokens": 25, "recovery": settings}
    fast = tiny3.generate_many(prompts, **options)
    slow = [tiny3.generate(p, **options, speculative=False) for p in prompts]
    assert [r.token_ids for r in fast] == [r.token_ids for r in slow]
    assert all(r.stats.recovery["floor"] for r in fast)


def test_S29_a_replacement_is_drawn_by_the_same_key(tiny: Engine) -> None:
    free = tiny.generate(PROMPT, max_tokens=16, temperature=0.8, seed=5).token_ids
    settings = recovery(floor=16, below_floor="replace")
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "recovery": settings}
    once = tiny.generate(PROMPT, stop_token_ids=[free[3]], **options)
    again = tiny.generate(PROMPT, stop_token_ids=[free[3]], **options)
    at = free.index(free[3])
    assert once.token_ids == again.token_ids
    assert once.token_ids[:at] == free[:at]
    assert free[3] not in once.token_ids


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("speculative", [True, False])
def test_S16_a_dictated_call_leaves_the_state_as_if_the_prompt_had_held_it(
    tiny: Engine, truth: list[int], words: Any, length: int, speculative: bool
) -> None:
    """Prefix lengths around the block's width of 4: what follows is what a prompt would say."""
    stop = truth[6]
    first = truth.index(stop)
    prefix = tuple(range(200, 200 + length))
    words(text=lambda ids: ":", calls=(prefix,))
    settings = recovery(floor=50, tool_prefix=True)
    found = tiny.generate(
        PROMPT, stop_token_ids=[stop], max_tokens=45, recovery=settings, speculative=speculative
    )
    said = [*truth[:first], *prefix]
    assert found.token_ids[: len(said)] == said
    assert found.stats.recovery["tool_prefix"] == 1
    rest = found.token_ids[len(said) :]
    assert rest
    assert rest == continued(tiny, [*PROMPT, *said], 45)[: len(rest)]
    if speculative:
        assert found.stats.plain_steps == 0  # taps were captured: drafting goes on


NAMES = (
    (200, 201, 202, 203, 204, 205, 206),
    (200, 201, 210, 211, 212),
    (200, 201, 210, 220, 221, 222, 223, 224, 225),
    (200, 201, 230),
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_forced_call_names_the_declared_tool_that_the_target_finds_likeliest(
    tiny: Engine, truth: list[int], words: Any, temperature: float
) -> None:
    """In plain decoding, in blocks of every size, and by the logits of forward passes here."""
    words(text=lambda ids: ":", calls=NAMES)
    options: dict[str, Any] = {"max_tokens": 45, "temperature": temperature, "seed": 9}
    if temperature:
        options["speculative"] = False
    free = tiny.generate(PROMPT, **options).token_ids
    options |= {"stop_token_ids": [free[6]], "recovery": recovery(floor=50, tool_prefix=True)}
    found = tiny.generate(PROMPT, **options)
    said = found.token_ids
    at = said.index(200)
    [name] = [ids for ids in NAMES if tuple(said[at : at + len(ids)]) == ids]
    assert found.stats.recovery["tool_prefix"] == 1
    model = dj.TargetModel(tiny.target, tiny.params["target"], "float32")
    logits = np.asarray(model.forward(np.array([[*PROMPT, *said]])).logits)[0]
    for place in range(len(name)):
        possible = {ids[place] for ids in NAMES if ids[:place] == name[:place]}
        row = logits[len(PROMPT) + at + place - 1]
        assert name[place] == max(possible, key=lambda i, row=row: row[i])
    again = continued(tiny, [*PROMPT, *said[: at + len(name)]], 45)
    if temperature:
        assert tiny.generate(PROMPT, **options).token_ids == said
        return
    assert said[at + len(name) :] == again[: len(said) - at - len(name)]
    for more in ({"speculative": False}, *({"block_size": n} for n in range(1, 5))):
        other = tiny.generate(PROMPT, **options, **more)
        assert other.token_ids == said
        assert other.stats.recovery == found.stats.recovery


@pytest.mark.parametrize("step", [0, 1])
def test_R12_a_step_that_fails_while_a_tool_is_chosen_changes_no_name(
    tiny: Engine, truth: list[int], words: Any, step: int
) -> None:
    words(text=lambda ids: ":", calls=NAMES)
    options: dict[str, Any] = {
        "stop_token_ids": [truth[6]],
        "max_tokens": 45,
        "recovery": recovery(floor=50, tool_prefix=True),
    }
    wanted = tiny.generate(PROMPT, **options)
    assert wanted.stats.plain_steps > step  # they choose: all others draft
    found = failing(tiny, Step.PLAIN, {step}).generate(PROMPT, **options)
    assert found.token_ids == wanted.token_ids
    assert found.stats.recovery == wanted.stats.recovery + Counter(rebuilt=1)


@pytest.mark.parametrize("speculative", [True, False])
def test_K1_K2_a_thought_is_closed_where_its_budget_ends(
    tiny: Engine, truth: list[int], words: Any, speculative: bool
) -> None:
    syntax = SYNTAXES["hermes"]
    close = (210, 211, 212, 213, 214, 215)
    words(text=lambda ids: "<think>", syntax=syntax, close=close)
    settings = recovery(answer_reserve=20)
    found = tiny.generate(PROMPT, max_tokens=31, recovery=settings, speculative=speculative)
    said = [*truth[:11], *close]
    assert found.token_ids[:17] == said
    assert found.token_ids[17:] == continued(tiny, [*PROMPT, *said], 14)
    assert found.finish_reason == "length"


def test_E3_an_empty_answer_is_confirmed_without_a_step(tiny: Engine, truth: list[int]) -> None:
    settings = recovery(empty_retry=True)
    found = tiny.generate(PROMPT, max_tokens=9, stop_token_ids=truth[:1], recovery=settings)
    assert found.token_ids == truth[:1]
    assert found.stats.fallbacks == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}
    assert found.stats.rounds == found.stats.plain_steps == 0


def test_E5_what_was_fed_meanwhile_is_undone_before_the_retry(
    tiny: Engine, truth: list[int], words: Any
) -> None:
    words(hidden=frozenset(truth[:3]))
    assert truth[3] not in truth[:3]
    settings = recovery(empty_retry=True)
    options = {"max_tokens": 9, "stop_token_ids": [truth[3]], "recovery": settings}
    stream = tiny.stream(PROMPT, **options)
    pieces = [piece.token_ids for piece in stream]
    assert [i for ids in pieces for i in ids] == truth[:4]  # held, then given once
    assert stream.result.stats.fallbacks == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}
    assert tiny.generate(PROMPT, max_tokens=20).token_ids == truth[:20]


def test_a_step_in_the_air_is_no_part_of_the_retry(
    tiny: Engine, truth: list[int], words: Any
) -> None:
    """A loop of hidden tokens ends where the device goes on: what it says then is not heard."""
    words(hidden=frozenset(truth))
    twice = next(i for i in range(1, 60) if truth[i] == truth[i - 1])
    settings = recovery(empty_retry=True, repeat_limit=2)
    found = tiny.generate(PROMPT, max_tokens=60, recovery=settings)
    assert found.token_ids == truth[: twice + 1]
    assert found.stats.fallbacks == {"empty_retry": 1, "empty_retry_confirmed_eos": 1}
    assert found.stats.recovery == {"repeat": 1}


@pytest.mark.parametrize("rule", ["repeat", "runaway", "floor"])
def test_recovery_is_counted_of_the_answer_that_is_given_alike_in_every_mode(
    tiny: Engine, truth: list[int], words: Any, rule: str
) -> None:
    """An answer that shows nothing is decoded up to three times where drafts are on, else once."""
    words(hidden=frozenset(range(251)))
    twice = next(i for i in range(1, 60) if truth[i] == truth[i - 1])
    options: dict[str, Any] = {"max_tokens": 60}
    if rule == "repeat":
        changes: dict[str, Any] = {"repeat_limit": 2}
    elif rule == "runaway":
        changes = {"runaway": True}
        options |= {"max_tokens": 40, "logit_bias": {7: 100.0}}
    else:
        changes = {"floor": twice, "below_floor": "replace"}
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


def test_nothing_is_counted_of_tokens_after_the_stop_string(
    scripted: Engine, truth: list[int]
) -> None:
    """A block goes past the place where the text of the answer ends."""
    vocab = {chr(256 + i): i for i in range(scripted.target.vocab_size)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    made = Engine(
        scripted.target,
        scripted.drafter,
        scripted.params,
        scripted.plan,
        tokenizer=Tokenizer(core, None, {}),
    )
    made.compiled.executables = scripted.executables
    new = [i for i in range(1, 40) if truth[i] not in truth[:i]]
    at = next(i for i in new if i % 4 and i + 1 in new)  # both in one block of four
    set_script(made, [*PROMPT, *truth])
    options: dict[str, Any] = {"max_tokens": 50, "min_tokens": 50, "stop": chr(256 + truth[at])}
    options["stop_token_ids"] = [truth[at + 1]]
    for speculative in (False, True):
        found = made.generate(PROMPT, speculative=speculative, **options)
        assert found.token_ids == truth[: at + 1]
        assert found.stats.recovery == {}


def test_held_back_tokens_keep_their_log_probabilities(
    tiny: Engine, truth: list[int], words: Any
) -> None:
    words(hidden=frozenset(truth[:3]))
    options = {"max_tokens": 9, "logprobs": 2, "speculative": False}
    free = tiny.generate(PROMPT, **options)
    held = tiny.generate(PROMPT, recovery=recovery(empty_retry=True), **options)
    assert held.token_ids == free.token_ids == truth[:9]
    fast = tiny.stream(PROMPT, max_tokens=9, logprobs=2, recovery=recovery(empty_retry=True))
    first = next(iter(fast))
    assert len(first.token_ids) > 3  # the hidden ones come with the first that is not
    assert held.logprobs == free.logprobs
    assert list(first.logprobs) == (free.logprobs or [])[: len(first.token_ids)]
    fast.close()


def test_tokens_behind_dictated_ones_that_were_held_back_keep_their_log_probabilities(
    tiny: Engine, truth: list[int], words: Any
) -> None:
    """A thought is closed while nothing is visible yet; the tokens behind it are the model's."""
    close = (7, 8)
    words(
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


def test_answers_of_one_prompt_are_recovered_one_by_one(tiny3: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 15, "temperature": 1.0, "seed": 6}
    free = tiny3.generate_many([PROMPT], n=2, **options)
    stop = free[0].token_ids[4]
    options |= {"stop_token_ids": [stop], "recovery": recovery(floor=15, below_floor="replace")}
    both = tiny3.generate_many([PROMPT], n=2, **options)
    alone = [tiny3.generate(PROMPT, **options | {"seed": seed}) for seed in (6, 7)]
    assert [r.token_ids for r in both] == [r.token_ids for r in alone]
    assert both[0].stats.recovery["floor"]
    cell = dj.CancelCell()
    lives = tiny3.enqueue(tiny3.prepare(PROMPT, n=3, max_tokens=30, cancel=cell))
    tiny3.advance()
    cell.cancel("shutdown")
    tiny3.advance()
    assert [live.result().finish_reason for live in lives] == ["cancelled"] * 3
    assert tiny3.active == 0


def test_G2_a_run_of_equal_tokens_ends_at_its_limit(tiny: Engine, truth: list[int]) -> None:
    twice = next((i for i in range(1, 60) if truth[i] == truth[i - 1]), None)
    assert twice, "the random target repeats itself somewhere"
    for speculative in (True, False):
        found = tiny.generate(
            PROMPT, max_tokens=60, recovery=recovery(repeat_limit=2), speculative=speculative
        )
        assert found.token_ids == truth[: twice + 1]
        assert found.finish_reason == "length"
        assert found.stats.recovery == {"repeat": 1}


@pytest.mark.parametrize("when", [0, 1, 3])
def test_C5_C7_a_cell_ends_a_request_wherever_it_stands(tiny: Engine, when: int) -> None:
    cell = dj.CancelCell()
    live = tiny.submit([i % 250 for i in range(100)], max_tokens=20, cancel=cell)
    for _ in range(when):
        tiny.advance()
    cell.cancel("disconnect")
    fed = live.num_fed
    tiny.advance()
    assert live.num_fed == fed <= 16 * when < 100
    assert live.result().finish_reason == "cancelled"
    assert live.result().token_ids == []
    assert live.stats.recovery == {"cancelled_disconnect": 1}
    assert not tiny.active
    assert not tiny.queued


def test_C13_the_next_request_on_the_row_is_not_disturbed(tiny: Engine, truth: list[int]) -> None:
    cell = dj.CancelCell()
    live = tiny.submit([9] * 60, max_tokens=40, cancel=cell)
    while len(live.token_ids) < 5:
        tiny.advance()
    cell.cancel()
    assert tiny.generate(PROMPT, max_tokens=20).token_ids == truth[:20]
    assert live.done


def test_C9_a_caller_of_generate_may_vanish_too(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, turns, advance = dj.CancelCell(), iter(range(100)), tiny.advance

    def counted() -> None:
        if next(turns) == 2:
            cell.cancel("disconnect")
        advance()

    monkeypatch.setattr(tiny, "advance", counted)
    found = tiny.generate(PROMPT, max_tokens=100, cancel=cell)
    assert found.finish_reason == "cancelled"
    assert 0 < len(found.token_ids) < 100
    assert next(turns) == 3  # the turn in which it was noticed was the last


def test_C19_a_hundred_cancellations_leave_nothing_behind(tiny3: Engine) -> None:
    rng = random.Random(5)
    lives = []
    for _ in range(100):
        prompt = [rng.randrange(251) for _ in range(rng.randint(1, 40))]
        cell = dj.CancelCell()
        lives.append(tiny3.submit(prompt, max_tokens=60, cancel=cell))
        for _ in range(rng.randint(0, 3)):
            tiny3.advance()
        cell.cancel("disconnect") if rng.random() < 0.5 else tiny3.cancel(lives[-1])
    while tiny3.busy:
        tiny3.advance()
    assert {live.result().finish_reason for live in lives} == {"cancelled"}
    assert (tiny3.active, tiny3.queued, len(tiny3.core.in_flight)) == (0, 0, 0)
    assert tiny3.generate(PROMPT, max_tokens=5).finish_reason == "length"


def test_C18_time_that_is_up_ends_with_what_there_is(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tiny.submit(PROMPT, max_tokens=40, recovery=recovery(deadline_s=5))
    while len(live.token_ids) < 5:
        tiny.advance()
    monkeypatch.setattr(live.sequence, "deadline", live.sequence.deadline - 5)
    tiny.advance()
    assert live.result().finish_reason == "length"
    assert 5 <= len(live.token_ids) < 40
    assert live.stats.recovery == {"deadline": 1}


def test_L1_L2_events_are_silent_when_off_and_told_when_on(
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


def test_lanes_change_only_by_a_measured_cost(tiny: Engine, truth: list[int]) -> None:
    engine = Engine(tiny.target, tiny.drafter, tiny.params, tiny.plan)
    engine.compiled.executables = tiny.executables
    engine.warm_up(measure=True)
    assert engine.break_even > 0
    engine.break_even = 3.9  # a random drafter never decides that much
    found = engine.generate(PROMPT, max_tokens=60)
    assert found.token_ids == truth
    assert found.stats.fallbacks["below_break_even"] >= 1
    assert found.stats.plain_steps > 10
    seeded = engine.stream(PROMPT, max_tokens=30, temperature=0.5, seed=1)
    assert len(list(seeded)) > 0
    assert not seeded.result.stats.fallbacks
    greedy = engine.submit(PROMPT, max_tokens=1)
    assert (seeded._handle.sequence.policy.fixed, greedy.sequence.policy.fixed) == (True, False)
    engine.cancel(greedy)


FAILURE = jax.errors.JaxRuntimeError("INTERNAL: made to fail")


def failing(engine: Engine, step: Step, calls: set[int], error: BaseException = FAILURE) -> Engine:
    """The same engine; some calls of one of its programs fail and take their state with them."""
    made = Engine(engine.target, engine.drafter, engine.params, engine.plan)
    number = iter(range(10_000))
    keys = [key for key in engine.executables if key.step == step]

    def call(key: ProgramKey, *arguments: Any) -> Any:
        found = engine.executables[key](*arguments)
        if next(number) in calls:
            raise error  # the donated state is gone
        return found

    failing = {key: functools.partial(call, key) for key in keys}
    made.compiled.executables = engine.executables | failing
    return made


@pytest.mark.parametrize(
    ("step", "calls"), [(Step.SPECULATIVE, {0}), (Step.SPECULATIVE, {4}), (Step.PREFILL, {1})]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_R12_after_a_failed_step_every_row_goes_on_where_it_was(
    tiny3: Engine, step: Step, calls: set[int], temperature: float
) -> None:
    prompts = [PROMPT, [7] * 30, list(range(20)), [9, 9]]
    options = {"max_tokens": 25, "temperature": temperature, "seed": 4}
    wanted = [r.token_ids for r in tiny3.generate_many(prompts, **options)]
    found = failing(tiny3, step, calls).generate_many(prompts, **options)
    assert [r.token_ids for r in found] == wanted
    assert sum(r.stats.recovery["rebuilt"] for r in found) == 3


def test_a_device_that_keeps_failing_ends_requests_by_name(tiny: Engine) -> None:
    engine = failing(tiny, Step.SPECULATIVE, set(range(2, 100)))
    with pytest.raises(dj.ComputeError, match=r"failed twice .*INTERNAL: made to fail"):
        engine.generate(PROMPT, max_tokens=40)
    assert not engine.active


@pytest.mark.parametrize("lost", ["state", "output", "row"])
def test_after_a_caller_was_stopped_in_a_turn_the_engine_goes_on(
    tiny: Engine, truth: list[int], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """By Ctrl-C, say: before the state comes back, as an answer is heard, or as a row is freed."""
    stops = iter([KeyboardInterrupt])

    def stop(*_: Any) -> None:
        for error in stops:
            raise error

    engine = failing(tiny, Step.SPECULATIVE, {2} if lost == "state" else set(), KeyboardInterrupt())
    live = engine.submit(PROMPT, max_tokens=20)
    if lost == "output":
        monkeypatch.setattr(live.sequence, "_emit", stop)
    elif lost == "row":
        monkeypatch.setattr(engine.core.scheduler, "remove", stop)
    with pytest.raises(KeyboardInterrupt):
        run_out(engine, live)
    monkeypatch.undo()
    if lost == "output":
        run_out(engine, live)
        with pytest.raises(dj.ComputeError, match="send the request again"):
            live.result()
    else:
        assert run_out(engine, live) == truth[:20]
    again = engine.submit(PROMPT, max_tokens=20)
    assert run_out(engine, again) == truth[:20]
    assert not engine.busy


def test_a_caller_stopped_where_a_turn_begins_or_ends_keeps_nobody_out(
    tiny: Engine, truth: list[int]
) -> None:
    """Python looks for signals where a function begins; a notebook keeps the traceback."""
    live = tiny.submit(PROMPT, max_tokens=20)
    kept: list[BaseException] = []
    for name in ("__enter__", "__exit__"):

        def stop(frame: Any, event: str, _: Any, name: str = name) -> None:
            of, by = frame.f_code, frame.f_back.f_code
            if of.co_name == name and "contextlib" in of.co_filename and by.co_name == "step":
                raise KeyboardInterrupt

        before = sys.gettrace()
        try:
            sys.settrace(stop)
            tiny.advance()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(before)
        assert not tiny.core._stepping.locked()
    assert run_out(tiny, live) == truth[:20]


def test_a_demanded_tool_that_was_not_declared_is_refused(tiny: Engine) -> None:
    with pytest.raises(RequestError, match="declared tools are: none"):
        tiny.generate(PROMPT, tool_choice={"type": "function", "function": {"name": "zzz"}})


def run_out(engine: Engine, live: Any) -> list[int]:
    """A request's output, by turns that are counted: whoever waits for ever fails."""
    for _ in range(300):
        if live.done:
            return live.token_ids
        engine.advance()
    engine.cancel(live)
    raise AssertionError("the request does not end")


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("rule", ["close", "prefix"])
def test_dictated_tokens_that_end_with_a_stop_token_end_the_output(
    tiny: Engine, truth: list[int], words: Any, speculative: bool, rule: str
) -> None:
    """The device freezes a row behind a stop token, so nobody would ever speak again."""
    end = truth[7]
    at = truth.index(end)
    assert 249 not in truth
    if rule == "close":
        words(text=lambda ids: "<think>", syntax=SYNTAXES["qwen_xml"], close=(250, 249),
              inside_thought=True)  # fmt: skip
        rules = recovery(answer_reserve=10)
    else:
        words(text=lambda ids: "Let me look:", syntax=SYNTAXES["qwen_xml"], calls=((250, 249),))
        rules = recovery(floor=40, tool_prefix=True)
    live = tiny.submit(
        PROMPT,
        max_tokens=30,
        stop_token_ids=[249, *([end] if rule == "prefix" else [])],
        speculative=speculative,
        recovery=rules,
    )
    found = run_out(tiny, live)
    assert live.result().finish_reason == "stop"
    assert found == [*truth[: 20 if rule == "close" else at], 250, 249]


def test_a_call_begun_just_before_a_thought_is_closed_lets_it_be_closed(
    tiny: Engine, scripted: Engine, words: Any
) -> None:
    """The call goes past the place where the thought would be closed; then the next token is."""
    prompt = [5, 4, 3]
    truth = tiny.generate(prompt, max_tokens=60).token_ids
    at = next(i for i in range(20, 30) if truth[i] not in truth[:i])
    words(
        text=lambda ids: "<think>: ",
        syntax=SYNTAXES["qwen_xml"],
        calls=((11, 12, 13, 14, 15, 16),),
        close=(21, 22),
        inside_thought=True,
    )
    rules = recovery(floor=200, tool_prefix=True, floor_in_thought=True, answer_reserve=60 - at - 3)
    stops = {"max_tokens": 60, "stop_token_ids": [truth[at]]}
    unclosed = dataclasses.replace(rules, answer_reserve=0)
    free = tiny.generate(prompt, recovery=unclosed, speculative=False, **stops).token_ids
    set_script(scripted, [*prompt, *free])  # drafts go past the place, too
    said = []
    for speculative in (False, True):
        live = scripted.submit(
            prompt,
            max_tokens=60,
            recovery=rules,
            stop_token_ids=[truth[at]],
            speculative=speculative,
        )
        said.append(list(run_out(scripted, live)))
    assert said[0] == said[1]
    assert said[0][at : at + 8] == [11, 12, 13, 14, 15, 16, 21, 22]


LEAD, CALL = 198, 199
OPENED = (LEAD, CALL, 200, 201)


def log_odds(engine: Engine, ids: list[int], token: int, other: int) -> float:
    """By a forward pass of its own."""
    model = dj.TargetModel(engine.target, engine.params["target"], "float32")
    logits = np.asarray(model.forward(np.array([ids])).logits)[0, -1]
    return float(logits[token] - logits[other])


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("likely", [True, False])
def test_an_end_is_judged_by_the_odds_that_the_target_really_gives(
    tiny: Engine, truth: list[int], words: Any, speculative: bool, likely: bool
) -> None:
    """Just above and just below the sum of both steps' odds; only the outcome shows anything."""
    stop = truth[6]
    said = truth[: truth.index(stop)]
    words(text=lambda ids: "w", calls=(OPENED,), opening=(LEAD, CALL))
    first = log_odds(tiny, [*PROMPT, *said], LEAD, stop)
    behind = [*PROMPT, *said, LEAD]
    best = continued(tiny, behind, 1)[0]
    total = first + log_odds(tiny, behind, CALL, best)
    rule = {"floor": 50, "below_floor": "odds", "tool_prefix": True}
    settings = recovery(**rule, call_odds=total - 0.01 if likely else total + 0.01)
    options = {"stop_token_ids": [stop], "max_tokens": 45, "speculative": speculative}
    free = tiny.generate(PROMPT, logprobs=2, **options)
    found = tiny.generate(PROMPT, recovery=settings, **options)
    if likely:
        assert found.token_ids[: len(said) + len(OPENED)] == [*said, *OPENED]
        assert found.stats.recovery == {"tool_prefix": 1}
        rest = found.token_ids[len(said) + len(OPENED) :]
        assert rest == continued(tiny, [*PROMPT, *said, *OPENED], 45)[: len(rest)]
        return
    assert first < 0  # it was asked: the first step's odds alone are not less than the total
    assert found.token_ids == free.token_ids == [*said, stop]
    assert found.finish_reason == "stop"
    assert not found.stats.recovery
    scored = tiny.generate(PROMPT, recovery=settings, logprobs=2, **options)
    assert scored.token_ids == free.token_ids
    for got, wanted in zip(scored.logprobs or (), free.logprobs or (), strict=True):
        assert got.token_id == wanted.token_id
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)


def test_a_plan_without_odds_has_the_programs_without_them(tiny: Engine, words: Any) -> None:
    plan = dataclasses.replace(tiny.plan, call_odds=False)
    without = Engine(tiny.target, tiny.drafter, tiny.params, plan)
    wanted = tiny.generate(PROMPT, max_tokens=20)
    found = without.generate(PROMPT, max_tokens=20)
    assert found.token_ids == wanted.token_ids
    assert "bitcast_convert" in tiny.executables[ProgramKey(Step.PLAIN, Variant.GREEDY)].stablehlo
    assert (
        "bitcast_convert"
        not in without.executables[ProgramKey(Step.PLAIN, Variant.GREEDY)].stablehlo
    )
    stop = wanted.token_ids[6]
    words(text=lambda ids: "w:", calls=(OPENED,), opening=(LEAD, CALL))
    settings = recovery(floor=50, below_floor="odds", tool_prefix=True)
    options = {"stop_token_ids": [stop], "max_tokens": 45, "recovery": settings}
    assert without.generate(PROMPT, **options).stats.recovery == {"tool_prefix": 1}
