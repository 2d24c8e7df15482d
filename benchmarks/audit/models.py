"""Setups, drawn from a seed: engines of every model family, drafter kind and plan.

Their models are small ones with random weights, the shipped pair, or given files.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import dflash_jax as dj
from benchmarks.audit.scenario import VARIANTS, Limits
from benchmarks.cases import heldout
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.config.rope import RopeConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.families.gemma3 import Gemma3Config
from dflash_jax.families.lfm2 import Lfm2Config
from dflash_jax.families.smollm3 import SmolLM3Config
from dflash_jax.graph import Graph
from dflash_jax.graph.keys import Variant
from dflash_jax.graph.resolve import resolve
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import HEAD, KINDS, MATRIX, Packed, Spec, fits, pack_tree
from dflash_jax.testing import (
    AMPLE,
    planned,
    random_params,
    scripted_engine,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)
from dflash_jax.tokenizer import Tokenizer

SHIPPED = "shipped"
GIVEN = "given"
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 16,
    "shared_expert_size": 20,
}
DENSE: dict[str, Any] = {"num_experts": 0, "per_layer_size": 0, "shared_layers": 0}
FAMILIES: dict[str, TargetConfig] = {
    "llama": tiny_target(model_type="llama"),
    "qwen3, two windows": tiny_target(windows=(10, None, 24)),
    "qwen3_moe": tiny_moe(),
    "qwen3_5": tiny_hybrid(),
    "qwen3_5_moe": tiny_hybrid(**EXPERTS),
    "gemma4": tiny_gemma(**DENSE),
    "gemma4, experts, shared keys, per-layer inputs": tiny_gemma(),
    "gpt_oss": tiny_gpt_oss(),
    "qwen2": tiny_target(model_type="qwen2", qkv_bias=True),
    "mistral": tiny_target(model_type="mistral", windows=(12, 12, 12)),
    "smollm3": SmolLM3Config(**vars(tiny_target(model_type="smollm3")), unrotated=(1,)),
    "gemma3": Gemma3Config(
        **vars(tiny_target(model_type="gemma3_text", windows=(10, None, 10), qk_norm=True)),
        full_rope=RopeConfig(theta=1e6),
    ),
    "olmo2": tiny_target(model_type="olmo2", joint_norm=True, norm_before=False, norm_after=True),
    "granite": tiny_target(
        model_type="granite", embedding_scale=3.0, score_scale=0.2, logit_divisor=4.0
    ),
    "glm4": tiny_target(model_type="glm4", norm_after=True, rotated=4, rotated_neighbours=True),
    "phi3": tiny_target(model_type="phi3", rotated=4),
    "ministral3": tiny_target(
        model_type="ministral3", query_growth=0.3, rope=RopeConfig(original_length=16)
    ),
    "qwen3_next": tiny_hybrid(**EXPERTS | {"model_type": "qwen3_next"}),
    "lfm2": Lfm2Config(
        **vars(tiny_target(model_type="lfm2", qk_norm=True)),
        recurrent=(True, False, True),
        conv_kernel=3,
    ),
}
FULL: dict[str, Any] = {"windows": (None, None), "causal": (False, False)}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {  # kind and fields
    "dflash": ("dflash", {}),
    "dflash2": ("dflash2", {}),
    "dspark": ("dspark", {"markov_head": "gated", "draft_vocab_size": 60, "own_head": True}),
    "dflash, full": ("dflash", FULL),
    "dspark, cut by confidence": ("dspark", {"markov_head": "rnn"} | FULL),
    "domino": ("domino", {"pure_draft_prefix_len": 2, "sample_from_anchor": False}),
    "dflash, causal": ("dflash", {"windows": (9, 20), "causal": (True, True)}),
}
WEIGHTS = ("float", "int8", "int4", "packed")
DTYPES = ("float32", "bfloat16", "float16")
CHUNKS = (4, 8, 16, 24)
BLOCKS = (2, 3, 4, 5, 8, 16)
CASES = 60  # per setup, whose compilation takes about as long
SHORT_CASES = 8  # per setup of the short form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Models and a plan.

    Attributes:
      family: family of the target in `FAMILIES`; "shipped" is the shipped pair, "given" is from
        files.
      drafter: one of `DRAFTERS`; empty if the family has its own.
      plan: fields of the plan.
      shape: fields of both configs that differ from the small models.
      syntax: a text that selects the tool-call syntax of the target.
      variants: program variants that requests may use.
      prompt_logprobs: requests may have prompt log-probabilities.
      scripted: drafts can be scripted.
    """

    family: str
    drafter: str = ""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter_shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    syntax: str = "<tool_call>"
    variants: tuple[str, ...] = VARIANTS
    prompt_logprobs: bool = True
    scripted: bool = True
    weights_seed: int = 0

    def __str__(self) -> str:
        plan = ", ".join(f"{name} {value}" for name, value in self.plan.items())
        return f"{' + '.join(filter(None, (self.family, self.drafter)))}: {plan}"


def draw_setup(seed: int, number: int, *, family: str = "") -> Setup:
    """Draw a setup; successive numbers cover all families, drafters and kinds of weights.

    Args:
      family: the only family to draw; all by default.
    """
    rng = random.Random(f"{seed}/setup/{number}")
    families = [family] if family else [*FAMILIES, SHIPPED]
    turn, at = divmod(number, len(families))
    chosen = families[at]
    kinds = list(DRAFTERS)
    weights = WEIGHTS[(at + turn) % len(WEIGHTS)]
    plan: dict[str, Any] = {
        "rows": rng.randint(1, 4),
        "chunk": rng.choice(CHUNKS),
        "block": rng.choice(BLOCKS),
        "dtype": DTYPES[(at + 2 * turn) % 2] if rng.random() < 0.85 else DTYPES[2],
        "kv_dtype": rng.choice(["auto", "float16", "int8"]),
        "lookahead": rng.randrange(2),
        "steps_per_call": rng.choice([1, 2, 4]),
        "rings": rng.random() < 0.7,
        "weights": weights,
        "kernels": rng.choice(["auto", "auto", "xla"]),
        "activations": rng.choice(["auto", "auto", "float"]),
    }
    plan["max_length"] = 5 * plan["chunk"] + 120
    if chosen in (SHIPPED, GIVEN):
        plan["weights"] = "float" if weights == "packed" else weights
        reports = rng.random() < 0.5
        return Setup(family=chosen, plan=plan, prompt_logprobs=reports, scripted=False)
    drafter = kinds[(at + turn) % len(kinds)]
    if drafter == "dspark, cut by confidence":
        plan["confidence_threshold"] = rng.choice([0.2, 0.5])
    width = {"int4": 64, "packed": 256}.get(weights)
    shape = {"hidden_size": width, "intermediate_size": width} if width else {}
    return Setup(
        family=chosen,
        drafter=drafter,
        plan=plan,
        shape=shape,
        drafter_shape=shape,
        syntax=rng.choice(["<tool_call>", "<function=", "<|channel|>", "<|tool_call>", ""]),
        prompt_logprobs=rng.random() < 0.5,
        weights_seed=rng.randrange(100),
    )


# Few programs but all events, for `make test`. Every variant is compiled once.
SHORT = (
    Setup(
        family="qwen3, two windows",
        drafter="dflash",
        plan={"rows": 3, "chunk": 16, "block": 4, "max_length": 200, "steps_per_call": 2},
        shape={"num_layers": 1, "windows": (24,)},
        drafter_shape={"num_layers": 1, "windows": (12,), "causal": (False,)},
        prompt_logprobs=False,
    ),
    Setup(
        family="qwen3_5",
        drafter="dflash2",
        plan={"rows": 2, "chunk": 8, "block": 5, "max_length": 160, "steps_per_call": 2},
        shape={"num_layers": 2, "recurrent": (True, False)},
        drafter_shape={"num_layers": 1, "windows": (12,), "causal": (True,)},
        syntax="<function=",
        variants=(),
        prompt_logprobs=False,
    ),
    Setup(
        family="llama",
        drafter="dspark",
        plan={"rows": 2, "chunk": 8, "block": 3, "max_length": 160}
        | {"weights": "int8", "kv_dtype": "int8", "steps_per_call": 1},
        shape={"num_layers": 1, "windows": (None,)},
        drafter_shape={"num_layers": 1, "windows": (None,), "causal": (False,)},
        variants=(),
        prompt_logprobs=False,
    ),
)


@dataclasses.dataclass(frozen=True)
class Course:
    """The setup of each case.

    Attributes:
      short: the few setups of the short form.
      family: the only family; all if empty.
    """

    seed: int = 0
    short: bool = False
    family: str = ""

    @property
    def cases(self) -> int:
        """Number of successive cases that share a setup."""
        return SHORT_CASES if self.short else CASES

    def setup(self, case: int) -> Setup:
        """Return the setup of a case."""
        number = case // self.cases
        if self.short:
            return SHORT[number % len(SHORT)]
        return draw_setup(self.seed, number, family=self.family)

    def rest(self, case: int) -> range:
        """Return the case and the later ones that share its setup."""
        return range(case, (case // self.cases + 1) * self.cases)


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
THOUGHT = ["<think>", "</think>"]
END = "<end>"
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

    def opened(
        self, *, segments: int = 0, folder: Path | None = None, drafter_seed: int | None = None
    ) -> Engine:
        """Return another engine over the same models and programs, with separate state.

        Args:
          segments: capacity of its prefix cache in prompt chunks.
          folder: prefix folder.
          drafter_seed: seed of random weights for its drafter; None for its own weights.
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
        if drafter_seed is not None:
            drawn = random_params(self.engine.graph.pair, dtype=plan.dtype, seed=drafter_seed)
            made.update_params(made.params | {"drafter": jax.device_put(drawn["drafter"])})
        return made


def build(setup: Setup, *, target: str = "tiny", drafter: str | None = "own") -> AuditedEngine:
    """Load or create the models of a setup, and compile all programs of its scenarios.

    Args:
      target, drafter: paths or hub ids, for the family "given".
    """
    plan = Plan(**setup.plan, prefix_cache=1 << 26, stop_slots=STOP_SLOTS)
    if setup.family in (SHIPPED, GIVEN):
        engine = dj.load(target, drafter, plan=plan)
    else:
        engine = random_engine(setup, plan)
    if setup.scripted:
        engine = scripted_engine(engine)
    engine.measures_drafting = False  # each case has a break-even of its own, to be repeatable
    wanted = [*setup.variants]
    if setup.prompt_logprobs:
        wanted.append(Variant.PROMPT)
    engine.warm_up(Variant.GREEDY, Variant.RECOVERY, *wanted, Variant.CHUNKS)
    return AuditedEngine(setup, engine, _limits(setup, engine))


def _limits(setup: Setup, engine: Engine) -> Limits:
    plan = engine.plan
    drawn = setup.family not in (SHIPPED, GIVEN)
    pool = tuple(range(engine.graph.config.vocab_size))
    texts: tuple[str, ...] = ()
    if engine.tokenizer is not None:
        texts = ("e", " ", ":", "\n", "a", "the", "1")
    if not drawn and engine.tokenizer is not None:
        pool = tuple(engine.tokenizer.encode(_sample_text(), specials=False))
    return Limits(
        rows=plan.rows,
        chunk=plan.chunk,
        block=plan.block,
        max_length=plan.max_length,
        rounds=plan.steps_per_call,
        stop_tokens=plan.stop_slots - len(engine.graph.config.eos_token_ids),
        pool=pool,
        ordered=not drawn and engine.tokenizer is not None,
        open_thought=(TOKENS.index(THOUGHT[0]),) if drawn else (),
        inviting=INVITING if drawn else (),
        stop_texts=texts,
        variants=setup.variants,
        prompt_logprobs=setup.prompt_logprobs,
        scripted=setup.scripted,
        structured=bool(engine.graph.config.eos_token_ids),
    )


@functools.cache
def _sample_text() -> str:
    """Return held-out text of the shipped pair."""
    rows = heldout()[:60]
    return "\n".join(
        message["content"] or "" for row in rows for message in row.get("messages", ())
    )


# -- random models ---------------------------------------------------------------------------


def random_engine(setup: Setup, plan: Plan) -> Engine:
    """Return an engine over random models, stored as the plan says."""
    target, drafter = _configs(setup)
    if plan.weights == "packed":
        plan = dataclasses.replace(plan, stored=_packed_kinds(target, drafter))
    plan = resolve(plan, build_pair(target, drafter), platform="cpu", memory=AMPLE)
    params = random_params(build_pair(target, drafter), dtype=plan.dtype, seed=setup.weights_seed)
    stored = dict(plan.stored)
    specs = planned(target, drafter, plan).specs
    params = _with_blocks(params, stored, setup.weights_seed)
    params = pack_tree(params, {name: how for name, how in specs.items() if name not in stored})
    graph = build_graph(target, drafter, plan)
    return Engine(graph, jax.device_put(params), tokenizer=make_tokenizer(setup.syntax))


def _configs(setup: Setup) -> tuple[TargetConfig, DrafterConfig]:
    fields = {"vocab_size": len(TOKENS), "eos_token_ids": (TOKENS.index(END),)} | dict(setup.shape)
    target = dataclasses.replace(FAMILIES[setup.family], **fields)
    kind, own = DRAFTERS[setup.drafter]
    own = {"target_layer_ids": (0,)} | own | dict(setup.drafter_shape)
    return target, tiny_drafter(target, kind, **own)


def _packed_kinds(target: TargetConfig, drafter: DrafterConfig) -> tuple[tuple[str, Spec], ...]:
    """Return packed kinds of the target's matrices: every kind of block in turn, where it fits."""
    pair = planned(target, drafter, Plan(dtype="float32"))
    shapes = pair.params
    forms = pair.forms
    of_files = [kind for kind in KINDS if kind not in ("int8", "int4z")]
    kinds = itertools.cycle(of_files)
    specs: list[tuple[str, Spec]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path({"target": shapes["target"]}):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if forms.get(name) in (MATRIX, HEAD):
            fitting = [k for k in itertools.islice(kinds, len(of_files)) if fits(k, leaf.shape[0])]
            if fitting:
                specs.append((name, (1, ((fitting[0], leaf.shape[1]),))))
            next(kinds)
    return tuple(specs)


def _with_blocks(params: Any, specs: Mapping[str, Spec], seed: int) -> Any:
    """Return parameters with random packed blocks in place of some matrices."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _blocks(specs[name][1][0][0], leaf.shape, rng) if name in specs else leaf

    return jax.tree_util.tree_map_with_path(draw, params)


def _blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Packed:
    """Return a random packed weight [D, ...] of both signs, of about 1 / sqrt(D)."""
    columns = math.prod(shape[1:])
    arrays: dict[str, np.ndarray] = {}
    form = KINDS[kind]
    span = {1: 256, 2: 16, 4: 64}[form.classes] / math.sqrt(12)  # deviation of uniform codes
    if form.sub:
        span *= 256 / math.sqrt(12) if form.high else 64 / math.sqrt(3)
    scale = shape[0] ** -0.5 / span
    for name, (rows, dtype) in form.arrays(shape[0]).items():
        size = (rows, columns)
        made = np.dtype(dtype)
        if name in ("scale", "low"):
            arrays[name] = np.full(size, scale * (7 if name == "low" else 1), made)
        elif dtype == "int8":
            arrays[name] = rng.integers(-127, 128, size).astype(made)
        else:
            arrays[name] = rng.integers(0, 64 if "sub" in name else 256, size).astype(made)
    return Packed(arrays, kind, shape)


def make_tokenizer(template: str) -> Tokenizer:
    """Return a tokenizer of `TOKENS`.

    Args:
      template: the chat template, which shows how tool calls are written.
    """
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[]))
    core.add_tokens([*MARKS, *THOUGHT])
    core.add_special_tokens([*HIDDEN, END])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, template, {})
