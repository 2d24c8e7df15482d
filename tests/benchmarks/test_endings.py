"""The program that measures how recovery judges fresh ends, and the warning about templates."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dflash_jax
from benchmarks.endings import FAMILIES, byte_tokenizer
from dflash_jax.bench import endings
from dflash_jax.engine import vocabulary
from dflash_jax.engine.state_machine import Recovery
from dflash_jax.server.prompt import ToolTurnCache, chat_prompt
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, syntax_of, tools_warning

TUNED = Path(__file__).parents[1] / "engine" / "state_machine"


@pytest.fixture
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_directory(Path(dflash_jax.__file__).parent / "data/tiny/target")
    assert found is not None
    return found


class FakeModel:
    """A target whose logits are 5 for the end token and 0 for all others."""

    def __init__(self, tokenizer: Tokenizer, end: str = "<|im_end|>"):
        self.tokenizer = tokenizer
        [self.end] = tokenizer.encode(end, specials=False)
        self.config = SimpleNamespace(eos_token_ids=(self.end,))

    def forward(self, ids: Any) -> Any:
        logits = np.zeros((*np.shape(ids), self.tokenizer.size), np.float32)
        logits[..., self.end] = 5.0
        return SimpleNamespace(logits=logits)


def test_fresh_cases_follow_from_the_seed_and_are_new() -> None:
    for kind in endings.KINDS:
        first = endings.fresh_cases(kind, 3, 40)
        assert first == endings.fresh_cases(kind, 3, 40)
        assert first != endings.fresh_cases(kind, 4, 40)
        assert len({case.text for case in first}) == 40
        assert len({case.language for case in first}) >= 10
    tuned = {line for name in ("stalls", "answers") for line in _lines(name)}
    slots = {name: values[0] for name, values in endings.SLOTS.items()} | {"tool": "search"}
    for table in endings.KINDS.values():
        texts = {text.format(**slots) for texts in table.values() for text in texts}
        assert not tuned & texts


def _lines(name: str) -> list[str]:
    return (TUNED / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def test_cases_are_judged_by_the_odds_of_the_target(tokenizer: Tokenizer) -> None:
    model: Any = FakeModel(tokenizer)
    cases = [c for kind in endings.KINDS for c in endings.fresh_cases(kind, 0, 12)]
    judged = list(endings.judge_cases(model, cases))
    # "\n" has 5 less than the end token, "<tool_call>" 5 less than the best one.
    assert {j.odds for j in judged} == {(-5.0, -5.0)}
    assert all(j.natural for j in judged)
    found = endings.summary(judged)
    assert (found["stalls"], found["answers"], found["natural_stalls"]) == (12, 12, 12)
    assert found["stalls_acted_on"] >= 10
    assert found["answers_disturbed"] == 0
    strict = list(endings.judge_cases(model, cases, Recovery(call_odds=30.0)))
    calls = sum(j.acted_on for j in strict)
    assert calls == sum(j.case.text.startswith("```json") for j in strict)


def test_nothing_is_acted_on_without_a_tool_syntax(tokenizer: Tokenizer) -> None:
    tokenizer.template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model: Any = FakeModel(tokenizer)
    judged = list(endings.judge_cases(model, endings.fresh_cases("stall", 0, 6)))
    assert not any(j.acted_on for j in judged)
    assert {j.odds for j in judged} == {None}


@pytest.mark.parametrize("name", sorted(set(FAMILIES.values())))
def test_the_tokenizer_of_bytes_has_every_tool_syntax(name: str) -> None:
    tokenizer = byte_tokenizer(SYNTAXES[name])
    text = "h\u00e9llo <|im_end|> \u4f60 {}"
    ids = tokenizer.encode(text, specials=False)
    assert max(ids) < 256
    assert tokenizer.raw(ids) == text
    assert syntax_of(tokenizer.teaches) is SYNTAXES[name]
    words = vocabulary.words_of(tokenizer, (), Recovery(), endings.TOOLS, None)
    own = SYNTAXES[name].lead + SYNTAXES[name].marker
    assert tokenizer.raw(words.opening) == own
    assert tokenizer.raw(words.opening[: words.lead]) == (SYNTAXES[name].lead or own)


def test_a_template_without_tools_is_warned_about(tokenizer: Tokenizer) -> None:
    talk, tools = [{"role": "user", "content": "Hi"}], list(endings.TOOLS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vocabulary.chat_ids(tokenizer, talk, {"tools": tools})
    tokenizer.template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    vocabulary.chat_ids(tokenizer, talk, {})
    with pytest.warns(UserWarning, match="no place for tools"):
        vocabulary.chat_ids(tokenizer, talk, {"tools": tools})
    text = tools_warning(tokenizer.teaches)
    for given, warned in ((tools, (text,)), ([], ())):
        request = GenerationRequest(model="tiny", api="chat", messages=talk, tools=given)
        assert chat_prompt(request, tokenizer, ToolTurnCache(), None).warnings == warned
    assert "syntax of tool calls is unknown" in (tools_warning("{{ tools }}") or "")
