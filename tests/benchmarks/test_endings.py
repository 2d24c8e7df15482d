"""How recovery judges fresh ends by a target's odds, and the warning about templates."""

import itertools
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import dflash_jax
from dflash_jax.bench import endings
from dflash_jax.engine import vocabulary
from dflash_jax.engine.state_machine import Recovery
from dflash_jax.server.prompt import chat_prompt
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, Syntax, syntax_of, tools_warning

TUNED = Path(__file__).parents[1] / "engine" / "state_machine"
# fmt: off
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
           "<|tool_call>", "<tool_call|>", '<|"|>', "<|start|>", "<|end|>", "<|channel|>",
           "<|message|>", "<|call|>", "<|return|>", "<|constrain|>", "<|start_header_id|>")
# fmt: on
UNUSED = (0xC0, 0xC1, *range(0xF5, 0x100), *range(1, 9))  # bytes of no text


def byte_tokenizer(syntax: Syntax) -> Tokenizer:
    """Return a tokenizer of 256 tokens, single bytes and special tokens, with a chat template."""
    alphabet = _letters()
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    specials = dict(zip(SPECIAL, UNUSED, strict=False))
    for text, place in specials.items():
        del vocabulary[alphabet[place]]
        vocabulary[text] = place
    core = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    rendered = syntax.render("NAME", {"KEY": "value"})
    mark = "" if syntax.template_mark in rendered else syntax.template_mark
    call, mark = json.dumps(rendered), json.dumps(mark)
    template = (
        "{%- if tools %}{{ tools | tojson + '\\n' + " + call + " + " + mark + " }}{% endif -%}"
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{{ '<|im_end|>\\n' }}{% endfor -%}<|im_start|>assistant\n"
    )
    return Tokenizer(core, template, {})


def _letters() -> list[str]:
    """Return the letters by which byte-level tokenizers write the 256 bytes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


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
    strict = list(endings.judge_cases(model, cases, Recovery(tool_call_threshold=30.0)))
    calls = sum(j.acted_on for j in strict)
    assert calls == sum(j.case.text.startswith("```json") for j in strict)


def test_nothing_is_acted_on_without_a_tool_syntax(tokenizer: Tokenizer) -> None:
    tokenizer.template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model: Any = FakeModel(tokenizer)
    judged = list(endings.judge_cases(model, endings.fresh_cases("stall", 0, 6)))
    assert not any(j.acted_on for j in judged)
    assert {j.odds for j in judged} == {None}


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_the_tokenizer_of_bytes_has_every_tool_syntax(name: str) -> None:
    tokenizer = byte_tokenizer(SYNTAXES[name])
    text = "h\u00e9llo <|im_end|> \u4f60 {}"
    ids = tokenizer.encode(text, specials=False)
    assert max(ids) < 256
    assert tokenizer.raw(ids) == text
    assert syntax_of(tokenizer.teaches) is SYNTAXES[name]
    known = vocabulary.vocabulary_of(tokenizer, (), Recovery(), endings.TOOLS, None)
    own = SYNTAXES[name].lead + SYNTAXES[name].marker
    assert tokenizer.raw(known.opening) == own
    assert tokenizer.raw(known.opening[: known.lead]) == (SYNTAXES[name].lead or own)


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
