"""Recovery on recorded endings: stalls become calls, answers stay as they are.

`benchmarks.endings` in commit 8b33321 recorded the shipped target's odds for each.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from fake_device import EOS, VOCABULARY, both, recovery

from dflash_jax.bench.endings import TOOLS
from dflash_jax.engine.state_machine.announcements import Cue, Ending, cue_of, read_ending
from dflash_jax.tool_parsers.tool_schema import Tool, tools_of

RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "endings.json"
LEAD, CALL, SAID = 80, 81, 10
RULES = recovery(floor=64, tool_prefix=True)


@pytest.fixture(scope="module")
def cases() -> dict[str, list[tuple[str, float, float]]]:
    """Return text and both odds of every recorded ending, by kind."""
    found: dict[str, list[tuple[str, float, float]]] = {"stall": [], "answer": []}
    for case in json.loads(RECORDED.read_text(encoding="utf-8"))["targets"][0]["cases"]:
        found[case["kind"]].append((case["text"], *case["odds"]))
    return found


def is_acted_on(text: str, lead: float, call: float) -> bool:
    """Return whether a call is forced, in all modes; otherwise nothing may change."""
    vocabulary = dataclasses.replace(
        VOCABULARY,
        text=lambda ids: "".join(text if i == SAID else "" for i in ids),
        calls=((LEAD, CALL, 900, 901),),
        opening=(LEAD, CALL),
        tools=tools_of(TOOLS),
    )
    odds = {LEAD: lead, CALL: call}
    seen = both([SAID, EOS], RULES, vocabulary=vocabulary, odds=lambda ids, wanted: odds[wanted])
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


A, B, C = Cue.STRONG, Cue.WEAK, Cue.NONE


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("", Ending()),
        ("All good.", Ending()),
        ("Now the file:", Ending(B, colon=True)),
        ("Now **the file:**", Ending(B, colon=True)),
        ("Now the file: \N{ROCKET}", Ending(B, colon=True)),
        ("Now the file\N{FULLWIDTH COLON}\n\n", Ending(B, colon=True)),
        ("Look at `a.py`:", Ending(B, colon=True)),
        ('He wrote "as follows":', Ending(B, colon=True)),
        ("It is `if x:`", Ending()),
        ('It says "now:"', Ending()),
        ("It says 'now:'", Ending()),
        ("I'll start:", Ending(A, colon=True)),
        ("Now let me run it.", Ending(A)),
        ("Found it.\nOk, I will fix it", Ending(A)),
        ("I\N{RIGHT SINGLE QUOTATION MARK}ll run it.", Ending(A)),
        ("Almost done. Let me check the file:", Ending(A, colon=True)),
        ("I'll look. One moment.", Ending(A)),
        ("Let me know if that helps.", Ending()),
        ("I'll try. It worked.", Ending()),
        ("Let me blorp it.", Ending(Cue.LIKELY)),
        ("All done :)", Ending()),
        ("At 10:30", Ending()),
        ("and then...", Ending(B)),
        ("and then\N{HORIZONTAL ELLIPSIS}", Ending(B)),
        ("and then \N{EM DASH}", Ending(B)),
        ("a|b\n-|-", Ending()),
        ("over\n\n---", Ending()),
        ("Is it so?", Ending(ambiguous=True)),
        ("Is it so?\n\nThen:", Ending(B, colon=True)),
        ("Is it so? Say:", Ending(B, colon=True, ambiguous=True)),
        ("```py\nx = 1:\n", Ending(ambiguous=True)),
        ("```py\nx = 1\n```", Ending()),
        ("Let me run:\n```sh\nls\n```", Ending(A)),
        ("I'll write it:\n```python\nx = 1\n```", Ending()),
        ("Let me run it:\n```python\nx = 1\n```", Ending(A)),
        ("```\nw(a=1)\n```", Ending(A)),
        ("Action: w\nAction Input: {}", Ending(A)),
        ("w('a.py')", Ending(A)),
        ("The result of w('a.py') is 3.", Ending()),
        ("You can run:\n```sh\nls\n```", Ending()),
        ("Run:\n```sh", Ending(ambiguous=True, opened_fence=True)),
        ("~~~\n\n", Ending(ambiguous=True, opened_fence=True)),
        ('```json\n{"name": "w", "arguments": {}}\n```', Ending(A, is_call=True)),
        ('```\n{"tool": "w", "args": {"a": 1}}', Ending(A, is_call=True)),
        ('For example:\n```\n{"name": "w", "arguments": {}}\n```', Ending()),
        ('```\n{"name": "v", "arguments": {}}\n```', Ending()),
        ('```\n{"name": "w", "arguments": {}, "response": "21"}\n```', Ending()),
        ('```\n{"function": {"name": "w", "arguments": {}}, "result": 3}\n```', Ending()),
        ('```\n{"id": "1", "function": {"name": "w"}}\n```', Ending(A, is_call=True)),
        ('```\n{"name": "w", }\n```', Ending()),
        ("I'll do this:\n- read it\n- fix it", Ending(B)),
        ("The steps:\n- read it\n- fix it", Ending()),
    ],
)
def test_endings_are_classified(text: str, ending: Ending) -> None:
    assert read_ending(text, (Tool("w", {}),)) == ending


@pytest.mark.parametrize(("kind", "least"), [("stalls", Cue.LIKELY), ("answers", Cue.NONE)])
def test_ends_of_many_languages(kind: str, least: Cue) -> None:
    """Each line is an output: announcements of actions, and answers, offers and promises."""
    lines = (Path(__file__).parent / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 55
    wrong = {
        line: cue.name for line in lines if (cue := cue_of(line)) < least or (not least and cue)
    }
    assert not wrong
