"""Every recovery event by blocks of 2 to 16, speculative and plain: all outputs are equal.

    python -m tests.soak.recovery_events

The target's next token follows from its last token alone, by a table, so that each scenario leads
to a known event, and all block sizes have the same output. Drafts are scripted, so that rounds
accept different numbers of them, also across the event. Takes about three minutes on two cores.
"""

import argparse
import dataclasses
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF
from dflash_jax.graph.resolve import resolve
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.testing import (
    AMPLE,
    QUICK_COMPILE,
    force_acceptance,
    random_params,
    scripted_engine,
    set_script,
    tiny_drafter,
    tiny_target,
)
from dflash_jax.tokenizer import Tokenizer

BLOCKS = range(2, 17)
PATTERNS = ((15,), (0,), (2, 0, 5, 1), (1, 3))
END = "<end>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME, ARGUMENTS = '\n{"name": "read", "arguments": {"path":', ' "a"}}\n'
LETTERS = [chr(i) for i in range(33, 127)] + ["\u0120", "\u010a"]  # a space and a newline last
# The markers of a call as two tokens each, for a model that was not trained on them.
PIECES = {OPEN: ("<tool", "_call>"), CLOSE: ("</to", "ol_call>")}
LIKELY, SECOND = 8.0, 3.0  # logits of next tokens


# Successive tokens; a token has one most likely successor, so no two walks disagree on one.
LINE = "\u010a"
WALKS = (
    ("<empty>", END, OPEN, NAME, ARGUMENTS, CLOSE, END),
    ("<stall>", "Let me check the file", ":", END),
    ("<announcement>", "I will open it", ".", END),
    ("<answer>", "It is ready", "!", END),
    ("<fence>", "Let me run it now.\n```\n", END),
    ("<call>", "Of course", ";", OPEN),
    ("<thinking>", "<think>", "hmm", "well", "so", "hmm"),
    ("<lines>", "<think>\n", "aha", LINE, "aha"),
    ("<sudden>", "<think>\n\n", "Eureka", END),
    ("<repeat>", "la", "la"),
    ("<loop>", "one ", "two ", "three ", "one "),
    (
        "<long loop>",
        *(f"{a}{b} " for a in ("big", "red", "old") for b in ("ger", "der", "est", "ly")),
    ),
    ("oldly ", "bigger "),
    ("Then", "more", END),  # where an end token is replaced
)
SPECIALS = [*(walk[0] for walk in WALKS if walk[0].startswith("<")), END]
WORDS = list(dict.fromkeys(t for walk in WALKS for t in walk if t not in [*SPECIALS, *LETTERS]))
TOKENS = [*LETTERS, *WORDS, *itertools.chain(*PIECES.values()), *SPECIALS]
SIZE = 8 * -(-len(TOKENS) // 8)
ID = {text: i for i, text in enumerate(TOKENS)}


def make_tool(*keys: str) -> list[dict[str, Any]]:
    """Return the declared tools: one with these required parameters."""
    properties = {key: {"enum": ["a"]} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    return [{"name": "read", "parameters": parameters | {"additionalProperties": False}}]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A request that leads to an event.

    Attributes:
      start: the prompt, a token that begins a walk.
      event: key of `stats.recovery` or `stats.fallbacks` that must be there; empty for none.
    """

    start: str
    event: str
    recovery: dj.Recovery
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def _only(**rules: Any) -> dj.Recovery:
    return dataclasses.replace(OFF, **rules)


def scenarios(*, structured: bool) -> Iterator[Scenario]:
    """Yield a scenario for every event.

    Args:
      structured: calls can be decoded again, for which grammars are needed.
    """
    rules = dj.Recovery(tool_call_threshold=-99.0)
    tools = {"tools": make_tool("path")}
    yield Scenario("<answer>", "", dj.Recovery())
    yield Scenario("<answer>", "", rules, tools)
    for start in ("<stall>", "<announcement>", "<fence>"):
        yield Scenario(start, "tool_prefix" if start != "<fence>" else "floor", rules, tools)
    # The text that leads to a call is likely enough, and its marker is not: the end is restored.
    yield Scenario("<announcement>", "", dj.Recovery(tool_call_threshold=8.0), tools)
    yield Scenario(
        "<stall>",
        "tool_prefix",
        _only(floor=64, tool_prefix=True, tool_call_threshold=-99.0),
        tools,
    )
    yield Scenario("<stall>", "floor_waived", rules, tools | {"max_tokens": 12})
    yield Scenario("<empty>", "floor", dj.Recovery())
    yield Scenario("<answer>", "min_tokens", dj.Recovery(), {"min_tokens": 7})
    yield Scenario("<empty>", "empty_retry", _only(empty_retry=True))
    yield Scenario("<thinking>", "thought_closed_by_force", dj.Recovery(answer_reserve=20))
    for reserve in range(29, 35):  # the limit is reached at each token of a period
        yield Scenario("<thinking>", "thought_closed_by_force", _only(answer_reserve=reserve))
    for reserve, event in ((20, "thought_closed"), (21, "thought_closed_by_force")):
        yield Scenario("<lines>", event, dj.Recovery(answer_reserve=reserve))
    yield Scenario("<sudden>", "thought_closed_by_force", dj.Recovery())
    yield Scenario("<repeat>", "repeat", _only(repeat_limit=7))
    yield Scenario("<repeat>", "runaway", dj.Recovery(loop_tokens=13), {"max_tokens": 300})
    yield Scenario("<loop>", "runaway", dj.Recovery(loop_tokens=40), {"max_tokens": 300})
    yield Scenario("<long loop>", "period", dj.Recovery(loop_tokens=40), {"max_tokens": 300})
    loops = tools | {"ignore_eos": True, "max_tokens": 300}
    yield Scenario("<call>", "repeated_calls", dj.Recovery(), loops)
    yield Scenario("<call>", "max_calls", dj.Recovery(repeated_calls=0, max_calls=5), loops)
    if structured:
        incomplete = {"tools": make_tool("path", "mode")}  # the table's call has no mode
        yield Scenario("<call>", "call_retry", dj.Recovery(), incomplete)
        yield Scenario("<announcement>", "call_retry", rules, incomplete)


def make_engine(
    block: int, steps_per_call: int = 1, *, pieces: bool = False, **plan_fields: Any
) -> Engine:
    """Return an engine of the table's target, with a drafter that is scripted.

    Args:
      pieces: the markers of calls are two tokens each.
    """
    target = tiny_target(num_layers=1, vocab_size=SIZE, hidden_size=SIZE, eos_token_ids=(ID[END],))
    drafter = tiny_drafter(target, target_layer_ids=(0,), windows=(None,), causal=(False,))
    fields = {"rows": 1, "chunk": 8, "block": block, "max_length": 400} | plan_fields
    plan = dj.Plan(**fields, steps_per_call=steps_per_call)
    plan = resolve(plan, build_pair(target, drafter), platform="cpu", memory=AMPLE)
    params = random_params(build_pair(target, drafter), dtype=plan.dtype, seed=0)
    weights = params["target"]
    layer = weights["layers_0"]
    for name, leaf in (("o", layer["attention"]), ("down", layer["mlp"])):
        leaf[name] = np.zeros_like(leaf[name])
    weights["embed"] = np.eye(SIZE, dtype=np.float32)
    weights["norm"] = np.ones(SIZE, np.float32)
    weights["head"] = _table(pieces=pieces) / np.float32(
        SIZE**0.5
    )  # a norm makes 1 of V the root of V
    return scripted_engine(
        Engine(build_graph(target, drafter, plan), params, tokenizer=make_tokenizer(pieces=pieces))
    )


def _table(*, pieces: bool) -> np.ndarray:
    """Return logits by last and next token."""
    logits = np.zeros((SIZE, SIZE), np.float32)
    logits -= 0.01 * np.arange(SIZE)  # no ties
    logits[:, ID["Then"]] += SECOND
    for walk in WALKS:
        parts = (PIECES.get(text, (text,)) if pieces else (text,) for text in walk)
        for last, following in itertools.pairwise(itertools.chain(*parts)):
            logits[ID[last], ID[following]] += LIKELY
    return logits


def make_tokenizer(*, pieces: bool) -> Tokenizer:
    """Return the tokenizer of the table's target; see `make_engine`."""
    letters = {text: i for i, text in enumerate(LETTERS)}
    core = tokenizers.Tokenizer(models.BPE(letters, merges=[]))
    unused = {marker: f"<unused {i}>" for i, marker in enumerate(PIECES)} if pieces else {}
    core.add_tokens([unused.get(word, word) for word in TOKENS[len(LETTERS) : -len(SPECIALS)]])
    core.add_special_tokens(SPECIALS)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, "<tool_call><think>", {})


def answer(engine: Engine, scenario: Scenario, *, speculative: bool) -> tuple[Any, ...]:
    """Return what must be equal in all modes and block sizes: ids, text, finish and events."""
    options: dict[str, Any] = {"max_tokens": 60} | scenario.options
    result = engine.generate(
        [ID[scenario.start]], recovery=scenario.recovery, speculative=speculative, **options
    )
    events = Counter(result.stats.recovery)
    found = events + Counter(result.stats.fallbacks)
    if speculative and scenario.event and scenario.event not in found:
        raise AssertionError(f"{scenario} led to {dict(found)} and {result.text!r}")
    return result.token_ids, result.text, result.finish_reason, events


def sweep(
    blocks: Sequence[int],
    patterns: Sequence[Sequence[int]] = PATTERNS,
    *,
    structured: bool = True,
    pieces: bool = False,
) -> Counter[str]:
    """Compare all scenarios, and return how often each event was compared.

    Args:
      patterns: numbers of drafts that successive rounds accept.
      structured, pieces: as for `scenarios` and `make_engine`.

    Raises:
      AssertionError: an output differs, or an event did not occur.
    """
    compared: Counter[str] = Counter()
    expected: dict[int, tuple[Any, ...]] = {}
    for block in blocks:
        engine = make_engine(block, steps_per_call=(1, 4)[block % 2], pieces=pieces)
        engine.warm_up("greedy", "recovery")
        for number, scenario in enumerate(scenarios(structured=structured)):
            plain = answer(engine, scenario, speculative=False)
            first = expected.setdefault(number, plain)
            assert plain == first, f"block {block}, plain, {scenario}:\n{plain}\n{first}"
            truth = [ID[scenario.start], *plain[0]]
            for pattern in patterns:
                set_script(engine, force_acceptance(truth, 1, pattern, SIZE))
                drafted = answer(engine, scenario, speculative=True)
                assert drafted == plain, (
                    f"block {block}, {pattern}, {scenario}:\n{drafted}\n{plain}"
                )
                compared[scenario.event or "none"] += 1
        engine.close()
        print(
            f"block {block}: {compared.total()} outputs equal so far", file=sys.stderr, flush=True
        )
    return compared


def main() -> int:
    """Run the sweep, and print the number of comparisons by event."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--quick-compile", action="store_true", help="compile without optimising")
    options = parser.parse_args()
    if options.quick_compile:  # read when jax initialises its backends
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_COMPILE])
    found = sweep(options.blocks) + sweep(options.blocks, pieces=True)
    for event, count in sorted(found.items()):
        print(f"{event:24} {count:5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
