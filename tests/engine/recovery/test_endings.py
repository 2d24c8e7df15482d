"""Recovery on recorded endings: stalls become calls, answers stay as they are.

`python -m benchmarks.endings` recorded the shipped target's odds for each.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from fake_device import EOS, WORDS, both, recovery

from dflash_jax.engine.recovery import Recovery
from dflash_jax.engine.recovery.endings import Ending, read_ending

RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "endings.json"
LEAD, CALL, SAID = 80, 81, 10
RULES = recovery(floor=64, tool_prefix=True, below_floor="odds", call_odds=Recovery().call_odds)


@pytest.fixture(scope="module")
def cases() -> dict[str, list[tuple[str, float, float]]]:
    """Return text and both odds of every recorded ending, by kind."""
    found: dict[str, list[tuple[str, float, float]]] = {"stall": [], "answer": []}
    for case in json.loads(RECORDED.read_text(encoding="utf-8"))["cases"]:
        found[case["kind"]].append((case["text"], case["lead"], case["call"]))
    return found


def is_acted_on(text: str, lead: float, call: float) -> bool:
    """Return whether a call is forced, in all modes; otherwise nothing may change."""
    words = dataclasses.replace(
        WORDS,
        text=lambda ids: "".join(text if i == SAID else "" for i in ids),
        calls=((LEAD, CALL, 900, 901),),
        opening=(LEAD, CALL),
    )
    odds = {LEAD: lead, CALL: call}
    seen = both([SAID, EOS], RULES, words=words, odds=lambda ids, wanted: odds[wanted])
    if seen.notes:
        return True
    assert seen.emitted == [SAID, EOS]
    return False


def test_most_stalls_are_acted_on(cases: dict[str, list[tuple[str, float, float]]]) -> None:
    acted = [is_acted_on(*case) for case in cases["stall"]]
    assert len(acted) >= 60
    assert sum(acted) >= 0.85 * len(acted)


def test_few_finished_answers_are_taken_for_stalls(
    cases: dict[str, list[tuple[str, float, float]]],
) -> None:
    acted = [is_acted_on(*case) for case in cases["answer"]]
    assert len(acted) >= 60
    assert sum(acted) <= 0.02 * len(acted)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("", Ending()),
        ("All good.", Ending()),
        ("Now the file:", Ending(colon=True)),
        ("Now **the file:**", Ending(colon=True)),
        ("Now the file: \N{ROCKET}", Ending(colon=True)),
        ("Now the file\N{FULLWIDTH COLON}\n\n", Ending(colon=True)),
        ("Look at `a.py`:", Ending(colon=True)),
        ('He wrote "as follows":', Ending(colon=True)),
        ("It is `if x:`", Ending()),
        ('It says "now:"', Ending()),
        ("It says 'now:'", Ending()),
        ("I'll start:", Ending(colon=True, intends=True)),
        ("Now let me run it.", Ending(intends=True)),
        ("Found it.\nOk, I will fix it", Ending(intends=True)),
        ("I\N{RIGHT SINGLE QUOTATION MARK}ll run it.", Ending(intends=True)),
        ("Let me know if that helps.", Ending()),
        ("I'll try. It worked.", Ending()),
        ("All done :)", Ending()),
        ("At 10:30", Ending()),
        ("and then...", Ending(trails_off=True)),
        ("and then\N{HORIZONTAL ELLIPSIS}", Ending(trails_off=True)),
        ("and then \N{EM DASH}", Ending(trails_off=True)),
        ("a|b\n-|-", Ending()),
        ("over\n\n---", Ending()),
        ("Is it so?", Ending(ambiguous=True)),
        ("Is it so?\n\nThen:", Ending(colon=True)),
        ("Is it so? Say:", Ending(colon=True, ambiguous=True)),
        ("```py\nx = 1:\n", Ending(ambiguous=True)),
        ("```py\nx = 1\n```", Ending()),
        ("Run:\n```sh", Ending(ambiguous=True, opened_fence=True)),
        ("~~~\n\n", Ending(ambiguous=True, opened_fence=True)),
    ],
)
def test_endings_are_classified(text: str, ending: Ending) -> None:
    assert read_ending(text) == ending
