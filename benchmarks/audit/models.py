"""Engines of setups: small models with random weights, the shipped pair, or given files."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import dflash_jax as dj
from benchmarks.audit.scenario import Limits
from benchmarks.audit.setups import DRAFTERS, FAMILIES, GIVEN, SHIPPED, Setup
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.graph import Graph
from dflash_jax.graph.keys import Variant
from dflash_jax.graph.resolve import resolve
from dflash_jax.kernels.products import with_kernel
from dflash_jax.models import build_graph, build_pair
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import KINDS, STORED, Packed, Spec, fits, pack_tree, spec
from dflash_jax.testing import AMPLE, planned, random_params, scripted_engine, tiny_drafter
from dflash_jax.tokenizer import Tokenizer

STOP_SLOTS = 32  # many, so that outputs end early


def _stored(text: str) -> str:
    """Return a text in the letters that stand for bytes in a byte-level vocabulary."""
    return text.replace(" ", "\u0120").replace("\n", "\u010a")


# The vocabulary of random models: printable letters, words, call markers, special tokens.
LETTERS = [chr(i) for i in range(33, 127)] + ["\u0120", "\u010a"]  # a space and a newline last
# Endings of stalls, bytes of incomplete characters, and ordinary words.
STALLS = ["\nLet me check:", "\nLet me run:", "\nI'll look (a):", "\nI will open `a`:"]
WORDS = [*STALLS, ":\n", "**x:**", *(f"\nLet me check {x}:" for x in LETTERS[64:90])]
WORDS += ["\u00c3", "\u00a9", "\u00e2", " done", "the", " a", "==", "\n\n", "()", '{"']
MARKS = ["<tool_call>", "</tool_call>", "<function=", "</function>"]
MARKS += ['{"name": "', '", "arguments": {"', "<parameter=", "read", "path"]  # prefixes of calls
HIDDEN = ["<|a|>", "<|b|>", "<|c|>", "<|d|>", "<|e|>"]  # hidden in text
THOUGHT, END = ["<think>", "</think>"], "<end>"
TOKENS = [*LETTERS, *map(_stored, WORDS)]
TOKENS += [*MARKS, *HIDDEN, *THOUGHT, END]
# Tokens that recovery acts on: ends of stalls, hidden tokens, an opened thought.
INVITING = tuple(map(TOKENS.index, [*map(_stored, STALLS), *HIDDEN[:2], THOUGHT[0]]))


@dataclasses.dataclass(frozen=True)
class AuditedEngine:
    """An engine with compiled programs, and the limits of its scenarios."""

    setup: Setup
    engine: Engine
    limits: Limits

    def opened(self, *, segments: int = 0, folder: Path | None = None) -> Engine:
        """Return another engine over the same models and programs, with separate state.

        Args:
          segments: capacity of its prefix cache in prompt chunks.
          folder: prefix folder.
        """
        cache = self.engine.core.prefix_cache
        assert cache is not None
        plan = dataclasses.replace(
            self.engine.plan,
            prefix_cache=segments * cache.segment_bytes,
            prefix_folder=str(folder or ""),
        )
        made = Engine(
            Graph(self.engine.graph.pair, plan),
            self.engine.params,
            tokenizer=self.engine.tokenizer,
        )
        made.core.runner.compiled.executables = dict(self.engine.core.runner.executables)
        return made


def build(setup: Setup, *, target: str = "tiny", drafter: str | None = "own") -> AuditedEngine:
    """Load or create the models of a setup, and compile all programs of its scenarios.

    Args:
      target, drafter: paths or hub ids, for the family "given".
    """
    plan = Plan(**setup.plan, prefix_cache=1 << 26, stop_slots=STOP_SLOTS)
    if setup.family in (SHIPPED, GIVEN):
        engine = dj.load(target, drafter, plan=plan)
        engine.measures_drafting = False  # each case has a break-even of its own, to be repeatable
    else:
        engine = scripted_engine(_random_engine(setup, plan))
    wanted = [*setup.variants, *[Variant.PROMPT][: setup.prompt_logprobs]]
    engine.warm_up(Variant.GREEDY, Variant.RECOVERY, *wanted)
    return AuditedEngine(setup, engine, _limits(setup, engine))


def _limits(setup: Setup, engine: Engine) -> Limits:
    plan, scripted = engine.plan, setup.family not in (SHIPPED, GIVEN)
    pool, texts = tuple(range(engine.graph.config.vocab_size)), ()
    if engine.tokenizer is not None:
        texts = ("e", " ", ":", "\n", "a", "the", "1")
    if not scripted and engine.tokenizer is not None:
        pool = tuple(engine.tokenizer.encode(_sample_text(), specials=False))
    return Limits(
        rows=plan.rows,
        chunk=plan.chunk,
        block=plan.block,
        max_length=plan.max_length,
        rounds=plan.steps_per_call,
        stop_tokens=plan.stop_slots - len(engine.graph.config.eos_token_ids),
        pool=pool,
        ordered=not scripted and engine.tokenizer is not None,
        open_thought=(TOKENS.index(THOUGHT[0]),) if scripted else (),
        inviting=INVITING if scripted else (),
        stop_texts=texts,
        variants=setup.variants,
        prompt_logprobs=setup.prompt_logprobs,
        scripted=scripted,
        structured=bool(engine.graph.config.eos_token_ids),
    )


@functools.cache
def _sample_text() -> str:
    """Return held-out text of the shipped pair."""
    path = Path(dj.__file__).parent / "data" / "tiny" / "heldout.jsonl"
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()[:60])
    return "\n".join(
        message["content"] or "" for row in rows for message in row.get("messages", ())
    )


# -- random models ---------------------------------------------------------------------------


def _random_engine(setup: Setup, plan: Plan) -> Engine:
    target, drafter = _configs(setup)
    plan = dataclasses.replace(
        plan, stored=_stored(target, drafter) if plan.weights == "packed" else ()
    )
    plan = resolve(plan, build_pair(target, drafter), platform="cpu", memory=AMPLE)
    params = random_params(build_pair(target, drafter), dtype=plan.dtype, seed=setup.weights_seed)
    if plan.weights == "packed":
        params = _with_blocks(params, dict(plan.stored), setup.weights_seed)
    else:
        params = pack_tree(params, planned(target, drafter, plan).specs)
    params = jax.device_put(with_kernel(params, plan.kernels != "xla"))
    return Engine(
        build_graph(target, drafter, plan), params, tokenizer=make_tokenizer(setup.syntax)
    )


def _configs(setup: Setup) -> tuple[TargetConfig, DrafterConfig]:
    fields = {"vocab_size": len(TOKENS), "eos_token_ids": (TOKENS.index(END),)} | dict(setup.shape)
    target = dataclasses.replace(FAMILIES[setup.family], **fields)
    kind, own = DRAFTERS[setup.drafter]
    own = {"target_layer_ids": (0,)} | own | dict(setup.drafter_shape)
    return target, tiny_drafter(target, kind, **own)


def _stored(target: TargetConfig, drafter: DrafterConfig) -> tuple[tuple[str, Spec], ...]:
    """Return packed kinds of the target's matrices: every kind of block in turn, where it fits."""
    shapes = planned(target, drafter, Plan(dtype="float32")).params
    kinds, found = itertools.cycle(STORED), []
    for path, leaf in jax.tree_util.tree_leaves_with_path({"target": shapes["target"]}):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if spec("int8", name, leaf.shape) is not None:
            fitting = [k for k in itertools.islice(kinds, len(STORED)) if fits(k, leaf.shape[0])]
            found += [(name, (1, ((kind, leaf.shape[1]),))) for kind in fitting[:1]]
            next(kinds)
    return tuple(found)


def _with_blocks(params: Any, specs: Mapping[str, Spec], seed: int) -> Any:
    """Return parameters with random packed blocks in place of some matrices."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _blocks(specs[name][1][0][0], leaf.shape, rng) if name in specs else leaf

    return jax.tree_util.tree_map_with_path(draw, params)


def _blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Packed:
    """Return a random packed weight [D, ...] of both signs, of about 1 / sqrt(D)."""
    columns, found = math.prod(shape[1:]), {}
    form = KINDS[kind]
    span = {1: 256, 2: 16, 4: 64}[form.classes] / math.sqrt(12)  # of uniform codes
    span *= (256 / math.sqrt(12) if form.high else 64 / math.sqrt(3)) if form.sub else 1
    scale = shape[0] ** -0.5 / span
    for name, (rows, dtype) in form.arrays(shape[0]).items():
        size, made = (rows, columns), np.dtype(dtype)
        if name in ("scale", "low"):
            found[name] = np.full(size, scale * (7 if name == "low" else 1), made)
        elif dtype == "int8":
            found[name] = rng.integers(-127, 128, size).astype(made)
        else:
            found[name] = rng.integers(0, 64 if "sub" in name else 256, size).astype(made)
    return Packed(found, kind, shape)


def make_tokenizer(template: str) -> Tokenizer:
    """Return a tokenizer of `TOKENS`.

    Args:
      template: its chat template, which shows how tool calls are written.
    """
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[]))
    core.add_tokens([*MARKS, *THOUGHT])
    core.add_special_tokens([*HIDDEN, END])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, template, {})
