"""The engine's interface: streams, finish reasons, rows, statistics, non-finite numbers."""

import asyncio
import dataclasses
import gc
import inspect
import json
import re
import subprocess
import sys
import threading
import typing
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from dflash_jax import Plan, Recovery
from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.result import Piece
from dflash_jax.engine.sampling_params import SamplingOptions, SamplingParams
from dflash_jax.engine.scheduler import StepPacer
from dflash_jax.errors import (
    ComputeError,
    PlanError,
    RequestError,
)
from dflash_jax.graph import Graph
from dflash_jax.kernels.native.build import library
from dflash_jax.networks import build_graph
from dflash_jax.plan import ResolvedPlan
from dflash_jax.quant.layouts import Interleaved
from dflash_jax.testing import AMPLE, force_acceptance, set_script
from dflash_jax.tokenizer import Tokenizer

PROMPT = [5, 4, 3, 2, 1]
MANY = 24


def twin(engine: Engine, **changes: Any) -> Engine:
    """Return another engine that shares the compiled programs."""
    graph = engine.graph
    parts = {"target": graph.config, "drafter": graph.drafter_config, "plan": graph.plan}
    graph = build_graph(**{name: changes.pop(name, old) for name, old in parts.items()})
    made = Engine(graph, **{"params": engine.params} | changes)
    made.core.runner.compiled.executables = engine.core.runner.executables
    return made


@pytest.fixture(scope="module", autouse=True)
def rows_are_left_free(tiny: Engine, tiny3: Engine) -> Iterator[None]:
    """Check that no test leaves requests in the shared engines."""
    yield
    for engine in (tiny, tiny3):
        assert not engine.core.active
        assert not engine.core.queued


@pytest.fixture(scope="module")
def truth(tiny: Engine) -> list[int]:
    """The target's own continuation of PROMPT."""
    return tiny.generate(PROMPT, max_tokens=60, speculative=False).token_ids


@pytest.fixture(scope="module")
def spoken(tiny: Engine) -> Engine:
    """`tiny` with a tokenizer: token i is the letter chr(256 + i)."""
    vocab = {chr(256 + i): i for i in range(tiny.graph.config.vocab_size)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    return twin(tiny, tokenizer=Tokenizer(core, None, {}))


def text(ids: list[int]) -> str:
    return "".join(chr(256 + i) for i in ids)


# -- construction -----------------------------------------------------------------------------


def test_an_engine_made_by_hand_completes_its_plan(tiny: Engine, truth: list[int]) -> None:
    plan = Plan(max_length=128, chunk=16, block=4)
    made = twin(tiny, plan=plan)
    assert isinstance(made.plan, ResolvedPlan)
    assert made.plan == dataclasses.replace(tiny.plan, memory_limit=made.plan.memory_limit)
    assert made.generate(PROMPT, max_tokens=9).token_ids == truth[:9]
    default = Engine(build_graph(tiny.graph.config, tiny.graph.drafter_config), tiny.params)
    assert default.plan.max_length == min(1024, tiny.graph.config.max_length)
    with pytest.raises(PlanError, match="max_length is 9999, but the target was made for"):
        twin(tiny, plan=Plan(max_length=9999))
    choices = made.plan.to_json() | {"max_length": 9999}  # a file may make them all
    with pytest.raises(PlanError, match="max_length is 9999, but the target was made for"):
        twin(tiny, plan=Plan(**choices))
    with pytest.raises(PlanError, match="block is 0, a choice left open"):
        dataclasses.replace(made.plan, block=0)


def test_engines_and_results_are_shown_in_one_line(spoken: Engine, tiny: Engine) -> None:
    assert repr(tiny) == (
        "<Engine: qwen3 target of 2 layers, dflash drafter, block 4, 1 row of 128 tokens, float32>"
    )
    assert "no drafter, 1 row of 128 tokens" in repr(twin(tiny, drafter=None))
    result = spoken.generate(PROMPT, max_tokens=90)
    assert len(result.text or "") == 90
    assert repr(result).startswith("<Result: 90 tokens (length), acceptance length ")
    assert len(repr(result)) < 120
    assert repr(tiny.generate(PROMPT, max_tokens=1)) == "<Result: 1 token (length)>"


# -- finish reasons ---------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [True, False])
def test_generation_ends_at_max_tokens(tiny: Engine, truth: list[int], speculative: bool) -> None:
    for n in (1, 2, 4, 5, 9):
        result = tiny.generate(PROMPT, max_tokens=n, speculative=speculative)
        assert result.token_ids == truth[:n]
        assert result.finish_reason == "length"
        assert result.stats.output_tokens == n
        assert result.text is None


def test_a_single_token_takes_no_round(tiny: Engine) -> None:
    stats = tiny.generate(PROMPT, max_tokens=1).stats
    assert stats.rounds == stats.plain_steps == 0
    assert stats.acceptance_length is None
    assert stats.tokens_per_s == 0.0


def test_prompt_and_output_may_fill_the_plan_exactly(tiny: Engine) -> None:
    prompt = [i % 250 for i in range(100)]
    plain = tiny.generate(prompt, max_tokens=28, speculative=False)
    fast = tiny.generate(prompt, max_tokens=28)
    assert len(plain.token_ids) == 28
    assert plain.token_ids == fast.token_ids


@pytest.mark.skipif(not library(), reason="no native kernels are compiled here")
def test_weights_can_be_reordered_for_native_kernels_and_back(tiny: Engine) -> None:
    turned = Graph(tiny.graph.pair, dataclasses.replace(tiny.plan, kernels="native"))
    params = turned.place_params(tiny.params)
    assert isinstance(params["target"]["layers_0"]["mlp"]["down"], Interleaved)
    back = tiny.graph.place_params(params)
    for ours, theirs in zip(*map(jax.tree.leaves, (back, tiny.params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_deleted_parameters_are_reported_by_name(tiny: Engine, truth: list[int]) -> None:
    engine = twin(tiny, params=jax.tree.map(jax.numpy.copy, tiny.params))
    for leaf in jax.tree.leaves(engine.params):
        leaf.delete()  # as donating it does
    for _ in range(2):
        with pytest.raises(ComputeError, match="parameters are gone: another"):
            engine.generate(PROMPT, max_tokens=5)
    engine.update_params(tiny.params)
    assert engine.generate(PROMPT, max_tokens=5).token_ids == truth[:5]


@pytest.mark.parametrize("pattern", [[0], [1], [3], [2, 0, 3]])
def test_a_stop_token_at_any_place_of_a_block_is_the_last_token(
    scripted: Engine, truth: list[int], pattern: list[int]
) -> None:
    whole = [*PROMPT, *truth]
    set_script(scripted, force_acceptance(whole, len(PROMPT), pattern, 251))
    for stop in dict.fromkeys(truth[:16]):
        wanted = truth[: truth.index(stop) + 1]
        result = scripted.generate(PROMPT, max_tokens=MANY, stop_token_ids=[stop])
        assert result.token_ids == wanted
        assert result.finish_reason == "stop"
        assert 1 + sum(result.stats.acceptance_lengths) == len(wanted)


def test_end_tokens_of_the_model_stop_unless_ignored(tiny: Engine, truth: list[int]) -> None:
    eos = truth[3]
    engine = twin(
        tiny, target=type(tiny.graph.config)(**vars(tiny.graph.config) | {"eos_token_ids": (eos,)})
    )
    assert engine.generate(PROMPT, max_tokens=9).token_ids == truth[: truth.index(eos) + 1]
    free = engine.generate(PROMPT, max_tokens=9, ignore_eos=True)
    assert free.token_ids == truth[:9]
    both = engine.generate(PROMPT, max_tokens=9, stop_token_ids=[truth[1]])
    assert both.token_ids == truth[: truth.index(truth[1]) + 1]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_text_and_tokens_equally_in_both_modes(
    spoken: Engine, scripted: Engine, truth: list[int], length: int
) -> None:
    """Also at any place in a block, all of which is accepted."""
    drafted = twin(scripted, tokenizer=spoken.tokenizer)
    set_script(drafted, [*PROMPT, *truth])
    for at in (0, 1, 2, 6, 7, 8, 11):
        stop = text(truth[at : at + length])
        begin = text(truth).index(stop)
        results = [
            engine.generate(PROMPT, max_tokens=30, stop=[stop, "never"], speculative=speculative)
            for engine, speculative in ((spoken, True), (spoken, False), (drafted, True))
        ]
        for result in results:
            assert result.text == text(truth[:begin])
            assert result.token_ids == truth[: begin + length]
            assert result.finish_reason == "stop"
            assert result.stats.output_tokens == begin + length


def test_a_stop_string_in_the_last_allowed_token_ends_as_a_stop(
    spoken: Engine, truth: list[int]
) -> None:
    result = spoken.generate(PROMPT, max_tokens=2, stop=text(truth[1:2]))
    assert result.finish_reason == "stop"


def test_pieces_hold_text_that_may_become_a_stop_string(spoken: Engine, truth: list[int]) -> None:
    stop = text(truth[5:9])
    assert text(truth).index(stop) == 5
    given = ""
    for piece in spoken.submit(PROMPT, max_tokens=30, stop=stop):
        given += piece.text
        assert not any(given.endswith(stop[:n]) for n in range(1, len(stop)))
    assert given == text(truth[:5])
    almost = stop[:-1] + "?"
    result = spoken.generate(PROMPT, max_tokens=8, stop=almost)
    assert result.text == text(truth[:8])  # held text is emitted at the end
    assert result.finish_reason == "length"


# -- streams and rows -------------------------------------------------------------------------


def test_pieces_join_to_the_result(spoken: Engine, truth: list[int]) -> None:
    stream = spoken.submit(PROMPT, max_tokens=20)
    pieces = list(stream)
    assert [i for p in pieces for i in p.token_ids] == truth[:20] == stream.result().token_ids
    assert "".join(p.text for p in pieces) == stream.result().text == text(truth[:20])


def test_a_stream_closed_early_keeps_its_output_and_frees_its_row(
    tiny: Engine, truth: list[int]
) -> None:
    stream = tiny.submit(PROMPT, max_tokens=60)
    for piece in stream:
        assert piece.token_ids
        break
    assert stream.result().finish_reason == "cancelled"
    got = stream.result().token_ids
    assert got == truth[: len(got)]
    assert 0 < len(got) < 60
    assert tiny.generate(PROMPT, max_tokens=20).token_ids == truth[:20]


def test_a_result_is_waited_for(tiny: Engine, truth: list[int]) -> None:
    handle = tiny.submit(PROMPT, max_tokens=5)
    with pytest.raises(TimeoutError, match="still runs after 0 s"):
        handle.result(timeout=0)
    assert handle.result().token_ids == truth[:5]
    assert [i for piece in handle for i in piece.token_ids] == truth[:5]  # after its end as well


def test_a_request_that_is_closed_before_it_began_has_no_tokens(tiny: Engine) -> None:
    handle = tiny.submit(PROMPT, max_tokens=5)
    handle.close()
    handle.close()
    assert handle.result().token_ids == []


def test_a_prepared_request_cannot_be_waited_for(tiny: Engine) -> None:
    [handle] = tiny.prepare(PROMPT, max_tokens=5)
    for wait in (handle.result, lambda: list(handle), lambda: asyncio.run(handle._wait())):
        with pytest.raises(RequestError, match=r"not queued; give it to `Engine.enqueue`"):
            wait()


def test_the_public_names_of_an_engine_are_few(tiny: Engine) -> None:
    assert len([name for name in dir(tiny) if not name.startswith("_")]) <= 20


@pytest.mark.parametrize("iterated", [False, True])
def test_dropping_a_stream_takes_no_lock_and_cancels_its_request(
    tiny: Engine, iterated: bool
) -> None:
    """Garbage collection may run while any lock is held, so dropping a stream takes none."""
    stream = tiny.submit(PROMPT, max_tokens=60)
    pieces: Any = iter(stream)
    drop = pieces.close if iterated else stream.__del__
    if iterated:
        next(pieces)
    dropping = threading.Thread(target=drop)
    with tiny.core._turns, tiny.core.inbox._admitting:
        dropping.start()
        dropping.join(5)
        assert not dropping.is_alive()
    tiny.advance()
    assert (tiny.core.active, tiny.core.queued) == (0, 0)
    assert stream.result().finish_reason == "cancelled"


def test_dropped_streams_block_neither_parameters_nor_the_queue(tiny: Engine) -> None:
    engine = twin(tiny, plan=dataclasses.replace(tiny.plan, queue=1))
    next(iter(engine.submit(PROMPT, max_tokens=60)))
    engine.update_params(tiny.params)  # nothing runs
    engine.submit(PROMPT, max_tokens=60)
    last = engine.submit(PROMPT, max_tokens=60)  # nothing waits
    engine.core.settle()
    assert engine.core.queued == 1
    last.close()
    assert engine.core.queued == 0


def test_a_stream_left_open_at_exit_needs_no_module_globals() -> None:
    ended: list[tuple[int, str]] = []
    inbox = SimpleNamespace(end=lambda *end: ended.append(end))
    driver: Any = SimpleNamespace(core=SimpleNamespace(inbox=inbox))
    output = SimpleNamespace(pieces=["a"])
    sequence: Any = SimpleNamespace(done=False, output=output, queued=True, number=7)
    pieces: Any = iter(RequestHandle(sequence, driver))
    assert next(pieces) == "a"
    pieces.close()
    assert ended[0] == (7, "dropped")


def test_streams_share_one_row_by_taking_turns(tiny: Engine, truth: list[int]) -> None:
    """The second stream waits for the row; iterating it runs the first to its end."""
    first = tiny.submit(PROMPT, max_tokens=20)
    second = tiny.submit([9, 8], max_tokens=20)
    pieces = iter(first)
    got = list(next(pieces).token_ids)
    other = [i for piece in second for i in piece.token_ids]
    got += [i for piece in pieces for i in piece.token_ids]
    assert got == truth[:20]
    assert other == tiny.generate([9, 8], max_tokens=20).token_ids


def test_streams_on_rows_of_their_own_run_side_by_side(tiny3: Engine) -> None:
    prompts = [[7], list(range(20)), PROMPT]
    alone = [tiny3.generate(p, max_tokens=15).token_ids for p in prompts]
    streams = [iter(tiny3.submit(p, max_tokens=15)) for p in prompts]
    got: list[list[int]] = [[] for _ in prompts]
    while any(streams):
        for i, stream in enumerate(streams):
            if stream and not (piece := next(stream, None)):
                streams[i] = None
            elif stream:
                got[i] += piece.token_ids
    assert got == alone


def test_more_prompts_than_rows_are_queued(tiny: Engine, tiny3: Engine) -> None:
    prompts = [[i, *range(i % 7), 200 - i] for i in range(8)]
    results = tiny3.generate_many(prompts, max_tokens=10)
    assert [r.token_ids for r in results] == [
        tiny.generate(p, max_tokens=10).token_ids for p in prompts
    ]
    assert [r.stats.prompt_tokens for r in results] == [len(p) for p in prompts]


def test_a_refused_prompt_among_many_leaves_no_request(tiny3: Engine) -> None:
    with pytest.raises(RequestError, match=r"\[999\] are out of range"):
        tiny3.generate_many([PROMPT, [999]], max_tokens=10)
    assert not tiny3.core.queued
    assert not tiny3.core.active


@pytest.mark.parametrize("prompts", ["text", 5])
def test_generate_many_refuses_anything_but_a_list(tiny3: Engine, prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"prompts is {prompts!r}; expected a list of texts"):
        tiny3.generate_many(prompts, max_tokens=10)


def test_a_plain_row_decodes_plainly_next_to_a_drafting_row(tiny3: Engine) -> None:
    """Sampled tokens depend on the decode mode, so the mode must not depend on other rows."""
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 8}
    alone = tiny3.generate([3, 1, 4], speculative=False, **options)
    drafting = tiny3.submit([2, 7], max_tokens=60)
    beside = tiny3.submit([3, 1, 4], speculative=False, **options)
    while not beside.done:
        tiny3.advance()
    assert drafting.stats.rounds > 5
    assert beside.token_ids == alone.token_ids
    assert (beside.stats.rounds, beside.stats.drafted) == (0, 0)
    assert beside.stats.plain_steps == alone.stats.plain_steps == 23
    drafting.close()


def test_cancelling_a_request_does_not_affect_other_rows(tiny3: Engine) -> None:
    alone = tiny3.generate([7, 7], max_tokens=30).token_ids
    keep, drop = tiny3.submit([7, 7], max_tokens=30), tiny3.submit(PROMPT, max_tokens=30)
    late = tiny3.submit(PROMPT, max_tokens=10)
    for _ in range(100):
        if drop.token_ids:
            drop.close()
        if keep.done and late.done:
            break
        tiny3.advance()
    assert keep.result().token_ids == alone
    assert drop.result().finish_reason == "cancelled"
    assert late.result().token_ids == tiny3.generate(PROMPT, max_tokens=10).token_ids


# -- statistics -------------------------------------------------------------------------------


def test_statistics_add_up(scripted: Engine, truth: list[int]) -> None:
    scripted.warm_up()
    set_script(scripted, force_acceptance([*PROMPT, *truth], len(PROMPT), [2, 0, 3, 1], 251))
    stats = scripted.generate(PROMPT, max_tokens=21).stats
    assert stats.acceptance_lengths == [3, 1, 4, 2, 3, 1, 4, 2]
    assert stats.rounds == 8
    assert stats.acceptance_length == 20 / 8
    assert stats.drafted == 8 * 3 == sum(stats.drafts_per_round)
    assert stats.accepted == 20 - 8 == sum(stats.accepted_per_position)
    assert stats.accepted_per_position == [6, 4, 2]
    assert stats.plain_steps == 0
    assert stats.output_tokens == 21
    assert stats.compile_s == 0.0
    assert 0 < stats.prefill_s <= stats.first_token_s
    assert stats.tokens_per_s == 20 / stats.decode_s


def test_a_smaller_block_verifies_fewer_drafts_and_decides_the_same_tokens(
    scripted: Engine, truth: list[int]
) -> None:
    set_script(scripted, [*PROMPT, *truth])
    for size in (1, 2, 3, scripted.plan.block):
        found = scripted.generate(PROMPT, max_tokens=25, block_size=size)
        assert found.token_ids == truth[:25]
        assert set(found.stats.acceptance_lengths[:-1]) <= {size}
        assert found.stats.drafted == found.stats.rounds * (size - 1)
    with pytest.raises(RequestError, match="blocks have 4 tokens"):
        scripted.generate(PROMPT, max_tokens=25, block_size=5)


def test_results_become_json(tiny: Engine, truth: list[int]) -> None:
    result = tiny.generate(PROMPT, max_tokens=5)
    result.stats.fallbacks["draft_not_finite"] += 2
    fields = json.loads(json.dumps(result.to_json()))
    assert fields["token_ids"] == truth[:5]
    assert fields["finish_reason"] == "length"
    assert fields["stats"]["fallbacks"] == {"draft_not_finite": 2}
    assert fields["stats"]["recovery"] == {}
    assert fields["stats"]["acceptance_length"] == result.stats.acceptance_length


# -- requests that cannot be served -----------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([3, 251, -1], {}, r"token ids \[251, -1\] are out of range; the target knows 0 to 250"),
        ("text", {}, "ships no tokenizer.json; give token ids"),
        (None, {}, "the prompt is None; expected a text or a list of ids"),
        ([1.5], {}, r"the prompt is \[1.5\]; expected a text or a list of ids"),
        (["1"], {}, r"the prompt is \['1'\]; expected"),
        ([1] * 120, {"max_tokens": 9}, "has 120 tokens and max_tokens is 9: together 129, but the"),
        ([1] * 120, {"max_tokens": 9}, "Lower max_tokens, shorten the prompt, or load with a"),
        ([1], {"max_tokens": 0}, "max_tokens is 0; expected an integer from 1"),
        ([1], {"max_tokens": 2.0}, "max_tokens is 2.0; expected an integer"),
        ([1], {"temperature": -1.0}, "temperature is -1.0; expected a number from 0"),
        ([1], {"temperature": float("nan")}, "temperature is nan; expected a number from 0"),
        ([1], {"temperature": "hot"}, "temperature is 'hot'; expected a number from 0"),
        ([1], {"temperature": True}, "temperature is True; expected a number from 0"),
        ([1], {"seed": True}, "seed is True; expected an integer of 64 bits"),
        ([1], {"top_p": -0.1}, "top_p is -0.1; expected a number from 0"),
        ([1], {"top_p": 1.5}, "top_p is 1.5; expected a number from 0"),
        ([1], {"top_k": -2}, "top_k is -2; expected an integer from 0"),
        ([1], {"top_k": 2**40}, "top_k is 1099511627776; expected an integer from 0"),
        ([1], {"seed": 2**64}, "seed is 18446744073709551616; expected an integer of 64 bits"),
        ([1], {"stop": 3}, "stop is 3; expected a text or several"),
        ([1], {"stop": "."}, "stop has texts, but this model ships no tokenizer.json; give stop_t"),
        ([1], {"stop_token_ids": ["a"]}, r"stop_token_ids is \['a'\]; expected token ids"),
        ([1], {"stop_token_ids": 3}, "stop_token_ids is 3; expected token ids, integers from 0"),
        ([1], {"recovery": True}, r"recovery is True; expected None, or a dj.Recovery\(...\)"),
        ([1], {"cancel": 5}, r"cancel is 5; expected None, or a dj.CancelCell\(\)"),
        (b"text", {}, "the prompt is b'text'; expected a text or a list of ids"),
        ([1], {"stop_token_ids": list(range(9))}, "9 stop tokens were given, but the plan has"),
    ],
)
def test_bad_requests_are_refused_by_name(
    tiny: Engine, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.generate(prompt, **{"max_tokens": 4} | options)
    assert not tiny.core.queued


@pytest.mark.parametrize("stop", ["", [""], [3]])
def test_stop_strings_that_are_no_texts_are_refused(spoken: Engine, stop: Any) -> None:
    with pytest.raises(RequestError, match="expected texts of at least one character"):
        spoken.generate(PROMPT, max_tokens=4, stop=stop)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["x"] * 100_000, "stop has 100000 texts; expected at most 64: give fewer"),
        (["x" * 257], "stop has a text of 257 characters; expected at most 256 in each: give a"),
        (["x" * 256] * 17, "stop has texts of 4352 characters together; expected at most 4096:"),
    ],
)
def test_stop_strings_beyond_a_bound_are_refused(
    spoken: Engine, stop: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        spoken.generate(PROMPT, max_tokens=4, stop=stop)
    most = ["x" * 64 for _ in range(64)]
    assert len(spoken.generate(PROMPT, max_tokens=4, stop=most).token_ids) == 4


def test_sampling_options_have_the_types_and_docs_of_sampling_params() -> None:
    kinds = {field.name: field.type for field in dataclasses.fields(cast(Any, SamplingParams))}
    assert typing.get_type_hints(SamplingOptions) == kinds
    doc = inspect.getdoc(SamplingParams) or ""
    assert {*re.findall(r"^ {2}(\w+): ", doc, re.MULTILINE)} >= kinds.keys()


def test_options_are_checked_without_jax() -> None:
    code = "from dflash_jax.engine.sampling_params import SamplingParams as S; import sys;"
    code += "print(S(logprobs=3, top_k=-1).top_k, 'jax' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["0", "False"]


@pytest.mark.parametrize("verb", ["generate", "submit", "check"])
def test_unknown_arguments_are_refused_with_a_suggestion(tiny: Engine, verb: str) -> None:
    call: Any = getattr(tiny, verb)
    with pytest.raises(TypeError, match=r"^'max_token' is no argument .*mean 'max_tokens'"):
        call(PROMPT, max_token=3)
    with pytest.raises(TypeError, match=r"^'zzz' is no argument .*known are max_tokens, "):
        call(PROMPT, zzz=3)
    if verb != "check":
        with pytest.raises(TypeError, match=r"^'n' is no argument"):
            call(PROMPT, n=2)


def test_none_is_accepted_for_optional_arguments(tiny: Engine, truth: list[int]) -> None:
    names = [name for name in SamplingOptions.__annotations__ if name != "max_tokens"]
    assert tiny.generate(PROMPT, max_tokens=6, **dict.fromkeys(names)).token_ids == truth[:6]


def test_no_max_tokens_is_all_that_the_plan_has_room_for(tiny: Engine) -> None:
    result = tiny.generate(PROMPT, max_tokens=None, ignore_eos=True)
    assert len(PROMPT) + len(result.token_ids) == tiny.plan.max_length
    with pytest.raises(RequestError, match="but the plan holds 128"):
        tiny.generate([1] * 128, max_tokens=None)


def test_minus_one_is_no_top_k_and_no_seed(tiny: Engine) -> None:
    """As in vLLM."""
    params = SamplingParams(temperature=1.0, top_k=-1, seed=-1)
    assert params == SamplingParams(temperature=1.0)


@pytest.mark.exhaustive
def test_seeds_have_64_bits(tiny: Engine) -> None:
    """Seeds that differ in any bit sample differently, in every row and answer."""
    seeds = (7, 7 + 2**32, 7 + 2**63, -7, 2**64 - 7, -(2**63), 2**63)

    def tokens(seed: int) -> tuple[int, ...]:
        return tuple(tiny.generate(PROMPT, max_tokens=8, temperature=3.0, seed=seed).token_ids)

    drawn = {seed: tokens(seed) for seed in seeds}
    assert len({*drawn.values()}) == 5
    assert drawn[-7] == drawn[2**64 - 7]  # the same bits
    assert drawn[-(2**63)] == drawn[2**63]
    assert tokens(7 + 2**32) == drawn[7 + 2**32]
    options = {"max_tokens": 8, "temperature": 3.0, "seed": 2**32 + 6, "n": 2}
    assert tuple(tiny.generate_many([PROMPT], **options)[1].token_ids) == drawn[7 + 2**32]
    for seed in (2**64, -(2**63) - 1, 1.5, True):
        with pytest.raises(RequestError, match="expected an integer of 64 bits"):
            tiny.generate(PROMPT, seed=seed)


def test_arguments_may_be_numpy_values(tiny: Engine, truth: list[int]) -> None:
    result = tiny.generate(
        np.array(PROMPT),
        max_tokens=np.int64(6),
        stop_token_ids=np.array([250]),
        temperature=np.float32(0),
        top_k=np.int32(5),
        block_size=np.int64(4),
        seed=np.uint32(2**32 - 1),
    )
    assert result.token_ids == truth[:6]


def test_generate_refuses_n(tiny: Engine) -> None:
    with pytest.raises(TypeError, match="'n'"):
        tiny.generate(PROMPT, max_tokens=2, n=2)


# -- threads ----------------------------------------------------------------------------------


class ConcurrentRequest(SimpleNamespace):
    """A request that ends in another thread between two reads of `done`."""

    @property
    def done(self) -> bool:
        pieces = self.output.pieces
        pieces.append(Piece((2,), "b") if pieces else Piece((1,), "a"))
        return len(pieces) > 1


def test_a_stream_yields_pieces_that_arrive_while_it_checks_for_the_end() -> None:
    output = SimpleNamespace(pieces=[])
    request: Any = ConcurrentRequest(output=output, queued=True, number=1, result=lambda: None)
    inbox = SimpleNamespace(empty=True)
    driver: Any = SimpleNamespace(core=SimpleNamespace(step=lambda: None, inbox=inbox))
    handle = RequestHandle(request, driver)
    given = [piece.text for piece in handle]
    assert given == [piece.text for piece in output.pieces[: len(given)]]
    assert "b" in given


def test_a_request_is_done_only_after_its_text_is_complete(
    spoken: Engine, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    finish = Detokenizer.finish
    handle = spoken.submit(PROMPT, max_tokens=6, stop=text(truth[5:6]) + "?")

    def noted(self: Detokenizer) -> str:
        seen.append(handle.done)
        return finish(self)

    monkeypatch.setattr(Detokenizer, "finish", noted)
    while not handle.done:
        spoken.advance()
    assert seen == [False]
    assert handle.result().text == text(truth[:6])


def test_generate_many_waits_while_the_queue_is_full(
    tiny3: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    try_add = tiny3.core.try_add

    def not_at_first(sequences: list[Any]) -> bool:
        if not refused:
            refused.append(sequences)
            return False
        return try_add(sequences)

    monkeypatch.setattr(tiny3.core, "try_add", not_at_first)
    assert len(tiny3.generate_many([PROMPT, PROMPT], max_tokens=3)) == 2
    assert refused


def test_break_even_is_measured_after_finished_requests_only(
    tiny: Engine, truth: list[int]
) -> None:
    engine = twin(tiny)
    engine.core.pacer = StepPacer(max_steps=1)  # single steps, one in flight ahead
    engine.generate(PROMPT, max_tokens=30, stop_token_ids=[truth[3]])
    assert engine.core.busy
    engine.time_drafting()
    assert engine.core.meter.value.at(0) > 0
    waiting = engine.submit(PROMPT, max_tokens=3)
    with pytest.raises(RequestError, match="requests are running"):
        engine.time_drafting()
    waiting.close()


def test_programs_are_shared_by_engines_of_one_shape_only(tiny: Engine) -> None:
    same = twin(tiny, plan=dataclasses.replace(tiny.plan, queue=3, memory_limit=AMPLE))
    same.share_programs(tiny)
    assert same.core.runner.executables is tiny.core.runner.executables
    other = twin(tiny, plan=dataclasses.replace(tiny.plan, stop_slots=3))
    with pytest.raises(PlanError, match=r"expected the same models and\s+the same plan\.shape"):
        other.share_programs(tiny)


def test_a_deleted_engine_frees_its_memory_at_once(tiny3: Engine) -> None:
    """Memory for the next model must be free without garbage collection."""
    engine = twin(tiny3)
    kept = engine.generate_many([PROMPT, PROMPT[:1]], max_tokens=20, recovery=Recovery())
    kept += [engine.generate(PROMPT, max_tokens=5, temperature=1.0, speculative=False)]
    for _ in engine.submit(PROMPT, max_tokens=20):
        break
    runner = weakref.ref(engine.core.runner)  # parameters, state and programs
    gc.disable()
    try:
        del engine
        assert runner() is None
    finally:
        gc.enable()
    assert all(result.token_ids for result in kept)
