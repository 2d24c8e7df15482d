"""The rule for loops: looping outputs end, healthy repetitions do not."""

import random
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from corpora import COUNTED, SICK, healthy, long_data, sick
from fake_device import VOCABULARY, both, loop_of, recovery

import dflash_jax
from dflash_jax.engine.state_machine import Recovery, guards
from dflash_jax.engine.state_machine.controller import (
    Finish,
    Policy,
    Prefilled,
    State,
    Stepped,
    advance,
)
from dflash_jax.engine.state_machine.loops import Kind, in_block, kind_of
from dflash_jax.engine.state_machine.output_vocabulary import NO_VOCABULARY, OutputVocabulary
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from dflash_jax.tool_parsers.tool_schema import Tool

MEASURED = recovery(loops=True)
LIMIT = 2048


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = Path(dflash_jax.__file__).parent / "data/tiny/target"
    found = Tokenizer.from_directory(folder)
    assert found is not None
    return found


def ended(
    ids: Sequence[int],
    vocabulary: OutputVocabulary = NO_VOCABULARY,
    settings: Recovery = MEASURED,
    *,
    closed: bool = False,
) -> tuple[int, str] | None:
    """Return the length at which a loop ends the output, and its kind; None without one."""
    tokens: list[int] = []
    guard = guards.Guard(guards.NO_MEMORY, (), settings, vocabulary)
    for token in ids:
        tokens.append(token)
        if kind := guard.take(token, lambda place: tuple(tokens[place:]), closed=closed):
            return len(tokens), kind
    return None


@pytest.mark.parametrize(
    ("unit", "at"),
    [
        (1, 96),
        (2, 96),
        (7, 96),
        (8, 96),
        (9, 192),
        (24, 192),
        (64, 192),
        (65, 195),
        (80, 240),
        (81, 243),
        (200, 600),
        (512, 1536),
        (513, None),
    ],
)
def test_a_loop_has_to_cover_96_tokens_or_192(unit: int, at: int | None) -> None:
    ids = [*range(1000, 1000 + unit)] * (1 + 1600 // unit)
    kind = "runaway" if unit <= 8 else "period"
    assert ended(ids) == (at and (at, kind))
    assert ended([5, 6, *ids]) == (at and (at + 2, kind))


def test_the_length_is_a_setting_and_copies_count_too() -> None:
    shorter = recovery(loops=True, loop_tokens=40)
    assert ended([9] * 200, settings=shorter) == (40, "runaway")
    short = recovery(loops=True, loop_tokens=2)
    assert ended([9] * 200, settings=short) == (12, "runaway")
    assert ended([7, 8, 9] * 60, settings=short) == (36, "runaway")
    assert ended([*range(50, 80)] * 6, settings=short) == (90, "period")
    long = recovery(loops=True, loop_tokens=500)
    assert ended([9] * 900, settings=long) == (500, "runaway")
    assert ended([*range(50, 80)] * 60, settings=long) == (1000, "period")


def test_G15_after_a_closed_thought_longer_units_may_cover_half_as_much() -> None:
    unit = [*range(1000, 1024)] * 20
    on = recovery(loops=True, watchdog=True)
    assert ended(unit, settings=on, closed=True) == (96, "period")
    assert ended(unit, settings=on) == (192, "period")
    assert ended(unit, closed=True) == (192, "period")


def test_a_loop_that_may_continue_is_judged_again_at_the_next_length() -> None:
    """Each length is judged once, by the text at that point."""
    lengths: list[int] = []

    def text(ids: Sequence[int]) -> str:
        lengths.extend([len(ids)] if len(ids) > 1 else [])
        return "0" * len(ids)

    assert ended([9] * LIMIT, OutputVocabulary(text=text)) == (1536, "runaway")
    assert lengths[1::2] == [96, 192, 384, 768, 1536]


def test_only_loops_are_decoded_to_text() -> None:
    def text(ids: Sequence[int]) -> str:
        assert len(ids) == 1, "read"
        return "w"

    rng = random.Random(1)
    ids = [rng.randrange(50) for _ in range(20_000)]
    assert ended([*ids, *[3] * 95, 4, *ids], OutputVocabulary(text=text)) is None


def test_loops_end_by_default_and_equal_tokens_alone_if_asked() -> None:
    assert ended([9] * 95, settings=Recovery()) is None
    assert ended([9] * 96, settings=Recovery()) == (96, "runaway")
    assert ended([*range(20)] * 9, settings=Recovery()) is None
    assert ended([9] * 96, settings=Recovery(repeat_limit=40)) == (40, "repeat")
    assert ended([9] * 96, settings=Recovery(loops=False)) is None
    watched = Recovery(loops=False, watchdog=True)
    assert ended([*range(20)] * 99, settings=watched, closed=True) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", Kind.TEXT),
        ("\n\n\n\n", Kind.TEXT),
        ("!!!!!!!!", Kind.TEXT),
        ("ests. I will run the tests. I will r", Kind.TEXT),
        (" very very very", Kind.TEXT),
        ("Look into `a[0](x)` and `b{1}` again.\n", Kind.TEXT),
        ("hahahahaha", Kind.WORD),
        ("\u518d\u770b\u4e00\u6b21", Kind.TEXT),
        ("#\n#\n#\n#\n#\n#\n#", Kind.TEXT),
        ("| --- | --- |", Kind.RULE),
        ("|  |  |\n|  |  |\n|  |", Kind.RULE),
        ("|" + " " * 40 + "|\n|" + " " * 40, Kind.RULE),
        (" " * 60, Kind.RULE),
        ("........", Kind.RULE),
        ("═════", Kind.RULE),
        ("},{},{},{", Kind.RULE),
        ("0,0,0,0,", Kind.DATA),
        ("ull, null, null, nu", Kind.DATA),
        ("AAAAAAAAA\nAAAAAA", Kind.DATA),
        ("x00\\x00\\x00\\x", Kind.DATA),
        ("0x00, 0x00, 0x", Kind.DATA),
        ("00ff 00ff 00ff", Kind.DATA),
        ("\n    '\\ufffe'\n    '\\ufffe'", Kind.DATA),
        ("h1v1h1v1h1", Kind.DATA),
        ("CAGCAGCAG", Kind.DATA),
        ("- item\n- item\n- item\n", Kind.DATA),
        ("1. Check it.\n1. Check it.\n", Kind.DATA),
        ("a,b,c\na,b,c\na,b,c\n", Kind.DATA),
        ("| Anna | Oslo |\n| Anna | Oslo |\n", Kind.DATA),
        ("Well, yes, I see.\nWell, yes, I see.\n", Kind.TEXT),
        ("Row the boat,\nDown the stream\nRow the boat,\nDown the stream\n", Kind.VERSE),
        ("Let me see\nNow I look\nLet me see\nNow I look\n", Kind.TEXT),
        ("    total += value\n", Kind.CODE),
        ("yes,no,yes,no,", Kind.CODE),
        ('print("all is done")\n', Kind.CODE),
        ("        text/plain\n        text/plain", Kind.CODE),
    ],
)
def test_kinds_of_text(text: str, kind: Kind) -> None:
    assert kind_of(text, text) is kind


def test_a_fence_and_a_call_are_blocks() -> None:
    vocabulary = OutputVocabulary(syntax=VOCABULARY.syntax, tools=VOCABULARY.tools)
    for text, inside in (
        ("Look:\n```\na", True),
        ("Look:\n~~~\na", True),
        ("Look:\n```\na\n```\nb", False),
        ("  ```python\n", True),
        ("a ``` b", False),
        ("<tool_call>\n<function=w>\n<parameter=a>\nb", True),
        ("<tool_call>\n<function=w>\n</function>\n</tool_call>b", False),
    ):
        assert in_block(text, vocabulary) is inside


def outcome(
    ids: Sequence[int], policy: Policy, sizes: Sequence[int]
) -> tuple[tuple[int, ...], Finish | None, str | None]:
    """Return the outcome of a request whose tokens arrive in steps of these sizes."""
    state, effects = advance(State(), Prefilled(ids[0]), policy)
    emitted, at, step = [*effects.emit], 1, 0
    while not effects.finish and at < len(ids):
        size = sizes[step % len(sizes)]
        event = Stepped(tuple(ids[at : at + size]), num_drafts=7)
        state, effects = advance(state, event, policy)
        emitted += effects.emit
        at, step = at + size, step + 1
    return tuple(emitted), effects.finish, loop_of(effects.notes)


@pytest.mark.parametrize("seed", range(12))
def test_cuts_do_not_depend_on_the_sizes_of_steps(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    _, beginning, unit = SICK[seed * 2]
    lead = tokenizer.encode("Let me think about it.\n" * rng.randrange(3), specials=False)
    ids = [*lead, *sick(beginning, unit, tokenizer.encode, 600)]
    settings = Recovery(floor=0)
    policy = Policy(
        max_tokens=900, recovery=settings, vocabulary=OutputVocabulary(text=tokenizer.raw)
    )
    found = {outcome(ids, policy, [1]), outcome(ids, policy, [8]), outcome(ids, policy, [600])}
    for _ in range(6):
        sizes = [rng.randint(1, 16) for _ in range(rng.randint(1, 9))]
        found.add(outcome(ids, policy, sizes))
    assert len(found) == 1
    [(emitted, finish, kind)] = found
    assert finish is (Finish.LENGTH if kind else None)
    assert (len(emitted), kind) == (ended(ids, policy.vocabulary, settings) or (len(ids), None))
    # In fences and lists loops may be longer.
    assert kind or "```" in beginning or unit.startswith(("-", "|"))


def test_plain_and_speculative_outputs_end_at_the_same_token() -> None:
    script = [*range(20, 40), *[*range(100, 124)] * 20]
    seen = both(script, MEASURED, max_tokens=500)
    assert (len(seen.emitted), seen.finish) == (20 + 192, Finish.LENGTH)
    assert (seen.loop, seen.notes) == ("period", {"period": 1})
    seen = both([42] * 400, recovery(loops=True, empty_retry=True), max_tokens=300)
    assert (len(seen.emitted), seen.loop) == (192, "runaway")


def test_loop_rules_count_forced_tokens() -> None:
    """A thought is closed within a loop: the rules continue with the forced tokens."""
    vocabulary = type(VOCABULARY)(**vars(VOCABULARY) | {"close": (61, 800)})
    settings = recovery(loops=True, watchdog=True, answer_reserve=250)
    script = [60, *[11] * 49, 0, 0, *[*range(2000, 2020)] * 20]
    seen = both(script, settings, vocabulary=vocabulary, max_tokens=300)
    assert seen.notes["period"] == 1
    assert len(seen.emitted) == 52 + 96


def text_of(texts: Iterator[tuple[str, str]], tokenizer: Tokenizer) -> list[tuple[str, Any]]:
    vocabulary = OutputVocabulary(text=tokenizer.raw)
    return [(name, ended(tokenizer.encode(text), vocabulary, Recovery())) for name, text in texts]


def test_healthy_texts_are_left_alone(tokenizer: Tokenizer) -> None:
    found = text_of(healthy(), tokenizer)
    assert len(found) >= 45
    assert not [(name, cut) for name, cut in found if cut]


def test_looping_outputs_end(tokenizer: Tokenizer) -> None:
    vocabulary = OutputVocabulary(text=tokenizer.raw)
    lengths = {}
    for name, beginning, unit in SICK:
        ids = sick(beginning, unit, tokenizer.encode, 3300)
        cut = ended(ids, vocabulary, Recovery())
        assert cut is not None, name
        fenced = "```" in beginning
        if not fenced and kind_of(unit * 3, beginning + unit * 3) in (Kind.TEXT, Kind.WORD):
            lengths[name] = cut[0]
    assert len(lengths) >= 18
    prose = [length for name, length in lengths.items() if length <= 300]
    assert len(prose) >= 0.85 * len(lengths), lengths


def test_loops_with_a_counter_end(tokenizer: Tokenizer) -> None:
    vocabulary = OutputVocabulary(text=tokenizer.raw)
    for name, line in COUNTED:
        text = "".join(line.format(i=i) for i in range(1, 400))
        cut = ended(tokenizer.encode(text), vocabulary, Recovery())
        assert cut is not None, name
        assert cut[0] <= 1200, name


def test_data_with_a_counter_and_long_data_are_left_alone(tokenizer: Tokenizer) -> None:
    vocabulary = OutputVocabulary(
        text=tokenizer.raw, syntax=SYNTAXES["hermes"], tools=(Tool("write_file", {}),)
    )
    for name, text in long_data():
        assert ended(tokenizer.encode(text), vocabulary, Recovery()) is None, name


def sources(characters: int) -> Iterator[tuple[str, str]]:
    """Yield files of the standard library up to a size, Python's own tests included."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
    random.Random(5).shuffle(paths)
    for path in (library / "encodings/iso8859_8.py", *paths):
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield str(path), text
        characters -= len(text)
        if characters < 0:
            return


@pytest.mark.exhaustive
def test_a_sample_of_pythons_library_is_left_alone(tokenizer: Tokenizer) -> None:
    assert not [found for found in text_of(sources(400_000), tokenizer) if found[1]]


@pytest.mark.soak
def test_pythons_library_is_left_alone(tokenizer: Tokenizer) -> None:
    assert not [found for found in text_of(sources(12_000_000), tokenizer) if found[1]]


@pytest.mark.soak
def test_many_healthy_texts_are_left_alone(tokenizer: Tokenizer) -> None:
    for seed in range(100):
        assert not [found for found in text_of(healthy(seed), tokenizer) if found[1]], seed
