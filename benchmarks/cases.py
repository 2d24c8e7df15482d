"""Benchmark cases: a pair of models, prompts, and optionally a forced acceptance pattern."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dflash_jax as dj
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import StructuredWeight
from dflash_jax.testing import force_acceptance, scripted_engine, set_script

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

    def use_script(self, work: Work) -> None:
        """Have the drafter draft what the work's script says, if it has one."""
        if work.script is not None:
            set_script(self.engine, work.script)

    def describe(self) -> dict[str, Any]:
        """Return the case as JSON values."""
        engine = self.engine
        drafter = engine.graph.drafter_config
        return {
            "target": engine.graph.config.to_json(),
            "drafter": None if drafter is None else drafter.to_json(),
            "target_parameters": count(engine.params["target"]),
            "drafter_parameters": count(engine.params["drafter"]),
            "plan": engine.plan.to_json(),
            "capacity": engine.plan.slots,
            "prompt_tokens": [len(w.prompt) for w in self.work],
            "max_tokens": self.max_tokens,
            "stop_ids": list(self.stop_ids),
            "acceptance": self.acceptance,
        }


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a random target with tied embeddings; heads have 64 numbers."""

    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int = 32000

    def target(self, model_type: str = "qwen3") -> TargetConfig:
        """Return the configuration of such a target."""
        return TargetConfig(
            model_type=model_type,
            hidden_size=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.heads // 2,
            head_dim=64,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            max_length=2048,
            tie_embeddings=True,
            qk_norm=model_type == "qwen3",
            windows=(None,) * self.layers,
        )


def random_drafter(target: TargetConfig, layers: int, block: int) -> DrafterConfig:
    """Return a DFlash drafter with layers of the target's size and a tap for each of them."""
    taps = np.linspace(1, max(target.num_layers - 3, 2), layers).round().astype(int)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        block_size=block,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=tuple(taps.tolist()),
        num_target_layers=target.num_layers,
        windows=(None,) * layers,
        causal=(False,) * layers,
    )


@dataclasses.dataclass(frozen=True)
class RandomPair:
    """A random Qwen3 pair, and the number of tokens it decodes."""

    shape: Shape
    drafter_layers: int
    block: int
    cycle: tuple[int, ...]
    prompt: int = 128
    max_tokens: int = 128


RANDOM = {
    "tiny-random": RandomPair(Shape(256, 6, 4, 768, 2048), 3, 8, CYCLE_8),
    "9m": RandomPair(Shape(256, 9, 4, 768, 8192), 3, 16, CYCLE_16),
    "60m": RandomPair(Shape(512, 14, 8, 1536), 5, 16, CYCLE_16, prompt=256),
}
NAMES = ("tiny", *RANDOM)


def heldout() -> list[dict[str, Any]]:
    """Return the shipped held-out prompts and texts."""
    path = Path(dj.__file__).parent / "data" / "tiny" / "heldout.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heldout_chats(chat: Callable[..., list[int]], count: int | None = None) -> list[list[int]]:
    """Return the first held-out conversations as token ids.

    Args:
      chat: the method of an engine (`chat_ids`) or a tokenizer (`chat`).
    """
    rows = [row for row in heldout() if "messages" in row][:count]
    return [chat(row["messages"], tools=row.get("tools") or None) for row in rows]


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
    return _random(name, RANDOM[name], max_length, rounds)


def _shipped(max_length: int, prompts: int, rounds: int, max_tokens: int = 128) -> Case:
    """Return the shipped pair on held-out conversations that fit, with its own acceptance."""
    engine = dj.load(plan=Plan(dtype="float32", max_length=max_length, steps_per_call=rounds))
    engine.measures_drafting = False
    chats = heldout_chats(engine.chat_ids)
    fitting = [Work(ids, None) for ids in chats if len(ids) + max_tokens <= max_length]
    stops = tuple(sorted(engine.graph.config.eos_token_ids))
    return Case("tiny", engine, fitting[:prompts], max_tokens, stops, "real")


def _random(name: str, pair: RandomPair, max_length: int, rounds: int) -> Case:
    """Return random weights with a scripted drafter that follows the acceptance cycle."""
    target = pair.shape.target()
    drafter = random_drafter(target, pair.drafter_layers, pair.block)
    length = max_length or pair.prompt + pair.max_tokens
    plan = Plan(dtype="float32", max_length=length, block=pair.block, steps_per_call=rounds)
    real = dj.random_engine(target, drafter, plan=plan, seed=1)
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, target.vocab_size - 1, pair.prompt).tolist()
    plain = real.generate(prompt, max_tokens=pair.max_tokens, speculative=False)
    truth = [*prompt, *plain.token_ids]
    script = force_acceptance(truth, pair.prompt, pair.cycle, target.vocab_size)
    work = [Work(prompt, script)]
    forced = "forced " + ",".join(map(str, pair.cycle))
    return Case(name, scripted_engine(real), work, pair.max_tokens, (), forced)
