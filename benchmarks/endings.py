"""How recovery judges fresh stalls and answers, by the odds of several targets.

    python -m benchmarks.endings                # tiny, SmolLM2 and the oracle families
    python -m benchmarks.endings --target DIR   # another target; also dflash-jax probe --recovery
    python -m benchmarks.endings --texts FILE   # texts of a JSONL file instead of composed ones

The stalls and answers are composed from a seed, in 18 languages. All of them are judged as if the
target ended its output there; `natural` ones are those after which it does. SmolLM2's own template
has no tool syntax, so that it is measured with a Hermes template, too. The oracle families are
tiny models with random weights, which show that the rules work with each tool syntax. They get a
tokenizer of single bytes, of which some are the special tokens of the family. Takes about 20
minutes.

`endings_first.jsonl` was written without knowledge of the rules; `endings_second.jsonl` and
`endings_third.jsonl` after the changes that followed from the ones before.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import dflash_jax as dj
from benchmarks.environment import write_result
from dflash_jax.bench import endings
from dflash_jax.target_model import TargetModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, Syntax, syntax_of

ORACLE = Path("tests/oracle/targets")
FAMILIES = {
    "llama3": "llama",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_5": "qwen_xml",
    "gemma4": "gemma4",
    "gpt_oss": "harmony",
}
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


def targets(given: str | None) -> Iterator[tuple[str, TargetModel]]:
    if given is not None:
        yield given, dj.load_target(given)
        return
    tiny = dj.load_target("tiny")
    assert tiny.tokenizer is not None
    yield "tiny", tiny
    smollm2 = dj.load_target("smollm2")
    assert smollm2.tokenizer is not None
    yield "smollm2, own template", smollm2
    smollm2.tokenizer.template, smollm2.tokenizer.tool_template = tiny.tokenizer.template, None
    yield "smollm2, Hermes template", smollm2
    for family, syntax in FAMILIES.items():
        model = dj.load_target(ORACLE / family)
        model.tokenizer = byte_tokenizer(SYNTAXES[syntax])
        end = model.tokenizer.encode("<|im_end|>", specials=False)[0]
        model.config = dataclasses.replace(model.config, eos_token_ids=(end,))
        yield f"oracle {family}, {syntax}", model


def measured(name: str, model: TargetModel, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a target, and its cases."""
    if options.texts:
        lines = options.texts.read_text(encoding="utf-8").splitlines()
        cases = endings.written_cases(lines, options.seed)
    else:
        composed = (endings.fresh_cases(k, options.seed, options.cases) for k in endings.KINDS)
        cases = list(itertools.chain.from_iterable(composed))
    judged = list(endings.judge_cases(model, cases))
    found = endings.summary(judged)
    print(endings.line(name, found), flush=True)
    syntax = syntax_of(model.tokenizer.teaches if model.tokenizer else None)
    lines = [
        {
            "kind": j.case.kind,
            "text": j.case.text,
            "natural": j.natural,
            "acted_on": j.acted_on,
            "odds": j.odds and [round(x, 2) for x in j.odds],
        }
        for j in judged
    ]
    return {"target": name, "syntax": syntax.name if syntax else None} | found | {"cases": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/endings.json"))
    parser.add_argument("--target", help="only this target")
    parser.add_argument("--texts", type=Path, help="JSONL of kind, language and text")
    parser.add_argument("--cases", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = {
        "call_odds": dj.Recovery().call_odds,
        "seed": options.seed,
        "texts": options.texts and options.texts.name,
        "targets": [measured(name, model, options) for name, model in targets(options.target)],
    }
    write_result(options.out, "endings", report)


if __name__ == "__main__":
    main()
