"""Benchmark cases: a pair of models, prompts, and optionally a forced acceptance pattern."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflash_jax as dj
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.loading import resolve_here
from dflash_jax.models import build_graph, build_pair
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import StructuredWeight
from dflash_jax.testing import force_acceptance, random_params, scripted_engine, set_script

CYCLE_16 = (7, 3, 15, 5, 0, 9, 6, 4)  # accepted drafts per round: 7.125 tokens
CYCLE_8 = (3, 1, 5, 2, 7, 0, 4, 4)  # 4.25 tokens


@dataclasses.dataclass(frozen=True)
class Work:
    """One prompt, and optionally a script of drafts by position."""

    prompt: list[int]
    script: list[int] | None


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine and the prompts it decodes."""

    name: str
    engine: Engine
    work: list[Work]
    max_tokens: int
    stop_ids: tuple[int, ...]
    acceptance: str  # "real", or the forced cycle

    def options(self, work: Work) -> dict[str, Any]:
        """Return the arguments of `submit`, after giving the drafter its script."""
        if work.script is not None:
            set_script(self.engine, work.script)
        return {"max_tokens": self.max_tokens, "ignore_eos": not self.stop_ids}

    def describe(self) -> dict[str, Any]:
        """Return the case as JSON values."""
        engine = self.engine
        return {
            "target": engine.graph.config.to_json(),
            "drafter": engine.graph.drafter_config.to_json()
            if engine.graph.drafter_config
            else None,
            "target_parameters": count(engine.params["target"]),
            "drafter_parameters": count(engine.params["drafter"]),
            "plan": json.loads(engine.plan.to_json()),
            "capacity": engine.plan.slots,
            "prompt_tokens": [len(w.prompt) for w in self.work],
            "max_tokens": self.max_tokens,
            "stop_ids": list(self.stop_ids),
            "acceptance": self.acceptance,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a random Qwen3 pair, and the number of tokens it decodes."""

    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    drafter_layers: int
    block: int
    cycle: tuple[int, ...]
    prompt: int
    max_tokens: int = 128


SHAPES = {
    "tiny-random": Shape(
        width=256, layers=6, heads=4, inner=768, vocabulary=2048, drafter_layers=3, block=8,
        cycle=CYCLE_8, prompt=128,
    ),
    "9m": Shape(
        width=256, layers=9, heads=4, inner=768, vocabulary=8192, drafter_layers=3, block=16,
        cycle=CYCLE_16, prompt=128,
    ),
    "60m": Shape(
        width=512, layers=14, heads=8, inner=1536, vocabulary=32000, drafter_layers=5, block=16,
        cycle=CYCLE_16, prompt=256,
    ),
}  # fmt: skip
NAMES = ("tiny", *SHAPES)


def count(params: dict[str, Any]) -> int:
    """Return the number of parameters, without a script and counting copies once."""
    kept = {name: leaves for name, leaves in params.items() if name != "script"}
    weights = jax.tree.leaves(kept, is_leaf=lambda leaf: isinstance(leaf, StructuredWeight))
    return sum(math.prod(weight.shape) for weight in weights)


def build(name: str, *, max_length: int = 0, prompts: int = 8, rounds: int = 0) -> Case:
    """Return the case of this name: "tiny" is the shipped pair, the others have random weights.

    Args:
      rounds: maximum steps per call, as in the plan.
    """
    if name == "tiny":
        return _shipped(max_length or 512, prompts, rounds)
    return _random(name, SHAPES[name], max_length, rounds)


def _shipped(max_length: int, prompts: int, rounds: int, max_tokens: int = 128) -> Case:
    """The shipped pair on held-out conversations that fit, with its own acceptance."""
    engine = dj.load(plan=Plan(dtype="float32", max_length=max_length, steps_per_call=rounds))
    engine.measures_drafting = False
    path = Path(dj.__file__).parent / "data" / "tiny" / "heldout.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chats = [
        engine.chat_ids(row["messages"], **({"tools": row["tools"]} if row.get("tools") else {}))
        for row in rows
        if "messages" in row
    ]
    fitting = [Work(ids, None) for ids in chats if len(ids) + max_tokens <= max_length]
    stops = tuple(sorted(engine.graph.config.eos_token_ids))
    return Case("tiny", engine, fitting[:prompts], max_tokens, stops, "real")


def _random(name: str, shape: Shape, max_length: int, rounds: int) -> Case:
    """Return random weights with a scripted drafter that follows the acceptance cycle."""
    target, drafter = configs(shape)
    length = max_length or shape.prompt + shape.max_tokens
    plan = Plan(dtype="float32", max_length=length, block=shape.block, steps_per_call=rounds)
    params = random_params(build_pair(target, drafter), seed=1)
    plan = resolve_here(plan, build_pair(target, drafter))
    real = Engine(build_graph(target, drafter, plan), jax.device_put(params))
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, target.vocab_size - 1, shape.prompt).tolist()
    plain = real.generate(prompt, max_tokens=shape.max_tokens, speculative=False)
    truth = [*prompt, *plain.token_ids]
    script = force_acceptance(truth, shape.prompt, shape.cycle, target.vocab_size)
    work = [Work(prompt, script)]
    forced = "forced " + ",".join(map(str, shape.cycle))
    return Case(name, scripted_engine(real), work, shape.max_tokens, (), forced)


def configs(shape: Shape) -> tuple[TargetConfig, DrafterConfig]:
    """Return configs of a target and of a drafter with one tap per layer."""
    common: dict[str, Any] = {
        "hidden_size": shape.width,
        "num_heads": shape.heads,
        "num_kv_heads": shape.heads // 2,
        "head_dim": 64,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
    }
    target = TargetConfig(
        model_type="qwen3",
        num_layers=shape.layers,
        tie_embeddings=True,
        qk_norm=True,
        windows=(None,) * shape.layers,
        **common,
    )
    drafter = DrafterConfig(
        num_layers=shape.drafter_layers,
        block_size=shape.block,
        mask_token_id=shape.vocabulary - 1,
        target_layer_ids=_taps(shape.layers, shape.drafter_layers),
        num_target_layers=shape.layers,
        windows=(None,) * shape.drafter_layers,
        causal=(False,) * shape.drafter_layers,
        **common,
    )
    return target, drafter


def _taps(layers: int, count: int) -> tuple[int, ...]:
    return tuple(np.linspace(1, layers - 3, count).round().astype(int).tolist())
