"""Full-size public models with random weights made on the device, and single steps to time."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax import Graph, Plan
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.graph.build import compile_programs, jit
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.protocols import Draft
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.state import DecodeState, RowRules, idle_rules
from dflash_jax.graph.steps.decoding import verify_block
from dflash_jax.graph.steps.drafting import draft as draft_block
from dflash_jax.graph.steps.inputs import DecodeInputs
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.networks import build_pair
from dflash_jax.testing import (
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_target,
)

PUBLISHED = Path(__file__).parents[1] / "tests" / "published"
Configs = tuple[TargetConfig, DrafterConfig]


# folders of target and drafter by name
FULL = {
    "qwen3-8b": ("Qwen3-8B", "Qwen3-8B-DFlash-b16"),
    "qwen3.6-27b": ("Qwen3.6-27B", "Qwen3.6-27B-DFlash"),
    "gemma-4-31b": ("gemma-4-31B-it", "gemma-4-31B-it-DFlash"),
    "gpt-oss-20b": ("gpt-oss-20b", "gpt-oss-20b-DFlash"),
}


def full(name: str) -> Configs:
    """Return the published configs of a target and its drafter."""
    target, drafter = (PUBLISHED / folder for folder in FULL[name])
    return read_target_config(target), read_drafter_config(drafter)


def smoke(name: str) -> Configs:
    """Return a pair of the same family with a few thousand weights."""
    made = {"qwen3.6-27b": tiny_hybrid, "gemma-4-31b": tiny_gemma, "gpt-oss-20b": tiny_gpt_oss}
    if name in made:
        target = made[name]()
    else:
        target = tiny_target(num_layers=1, windows=(None,), hidden_size=64, intermediate_size=64)
    return target, tiny_drafter(target, block_size=4, target_layer_ids=(0,))


def random_params(graph: Graph) -> Any:
    """Return random non-zero parameters in the plan's formats, made on the device."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(graph.params)
    made = []
    for i, (path, leaf) in enumerate(leaves):
        name = str(getattr(path[-1], "key", ""))
        made.append(_draw(leaf.shape, str(leaf.dtype), name == "a_log")(jax.random.key(i)))
    return jax.tree.unflatten(tree, made)


@functools.lru_cache(maxsize=256)
def _draw(shape: tuple[int, ...], dtype: str, rates: bool) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled draw of one leaf; packed scales are small, norms near one."""

    def draw(key: jax.Array) -> jax.Array:
        if dtype in ("int8", "uint8"):
            return jax.random.randint(key, shape, -100 if dtype == "int8" else 0, 100, dtype)
        if dtype == "int32":
            return jnp.zeros(shape, dtype)
        noise = jax.random.normal(key, shape, jnp.bfloat16)
        if rates:
            return (noise * 0.5 - 2).astype(dtype)
        if len(shape) == 1:
            return (1 + 0.1 * noise).astype(dtype)
        packed = dtype == "float16" or (dtype == "float32" and shape[0] == 1)
        if packed:
            return (noise * 1e-4).astype(dtype)
        stacked = len(shape) > 3 and shape[0] < 512  # experts first
        inputs = shape[1] if stacked else shape[0]
        return (noise * inputs**-0.5).astype(dtype)

    return jit(draw)


def planned(
    configs: Configs,
    plan: Plan,
    *,
    platform: str = "gpu",
    memory: int = 139 * 2**30,
    mesh: Mesh | None = None,
) -> Graph:
    """Return the graph of both configs, by default for an H200."""
    pair = build_pair(*configs)
    if mesh is not None:
        plan = dataclasses.replace(plan, mesh=tuple(mesh.shape.values()))
    plan = resolve(plan, pair, platform=platform, memory=memory)
    return Graph(pair, plan, mesh=mesh)


def one_token(graph: Graph) -> Graph:
    """Return a graph whose plain steps feed one token."""
    return graph.with_plan(exact=False, plain_width=1)


def part_programs(graph: Graph) -> dict[str, Program]:
    """Return the programs of an exact plan by name: parts of a decode step, and the whole.

    "plain1" and "plain" are plain steps of one token and of the plan's width, "verify" and "draft"
    the halves of "fused".
    """
    plan = graph.plan
    declared = declare(graph)
    pair = graph.pair
    plain = ProgramKey(Step.PLAIN, Variant.GREEDY)
    fused = ProgramKey(Step.SPECULATIVE, Variant.GREEDY)
    narrow = declare(one_token(graph))[plain]
    params, state, _, inputs = declared[plain].arguments
    block = jax.ShapeDtypeStruct((plan.rows, plan.block), jnp.int32)
    verify = functools.partial(verify_step, pair)
    draft = functools.partial(draft_step, pair)
    arguments = (params, state, None, inputs)
    parts = {
        "plain1": narrow,
        "plain": declared[plain],
        "verify": Program(plain, verify, (*arguments, block), (1,), declared[plain].placement),
        "draft": Program(plain, draft, arguments, (1,), declared[plain].placement),
        "fused": declared[fused],
    }
    return {name: dataclasses.replace(p, key=ProgramKey(name)) for name, p in parts.items()}


@dataclasses.dataclass
class Bench:
    """The parts of a decode step as executables over one state at position `context`."""

    graph: Graph
    params: Any
    context: int

    def __post_init__(self) -> None:
        self.plan = self.graph.plan
        self.pair = self.graph.pair
        free = idle_rules(self.plan)
        self.rules = dataclasses.replace(free, limit=jnp.full_like(free.limit, 1 << 30))
        self.state = self._filled()

    def compile(self, *names: str) -> dict[str, Any]:
        """Return executables of parts by name."""
        programs = part_programs(self.graph)
        built = compile_programs(programs[name] for name in names)
        return {key.step: executable for key, executable in built.items()}

    def run(self, executable: Any) -> Any:
        """Dispatch one step, keep its state, and return its output."""
        extra = (self.block,) if executable.key.step == "verify" else ()
        inputs = DecodeInputs(self.rules)
        self.state, _, out = executable(self.params, self.state, None, inputs, *extra)
        return out

    @property
    def block(self) -> jax.Array:
        """A block to verify, int32 [rows, block]."""
        shape = (self.plan.rows, self.plan.block)
        return jnp.ones(shape, jnp.int32)

    def _filled(self) -> DecodeState:
        """Return a state with random caches, every row at the same position."""
        shapes = jax.eval_shape(self.graph.empty_state)
        leaves, tree = jax.tree.flatten(shapes)
        made = [_cached(x.shape, str(x.dtype))(jax.random.key(i)) for i, x in enumerate(leaves)]
        state: DecodeState = jax.tree.unflatten(tree, made)
        at = jnp.full((self.plan.rows,), self.context, jnp.int32)
        return dataclasses.replace(state, position=at, anchor=jnp.full_like(at, 3))


@functools.lru_cache(maxsize=256)
def _cached(shape: tuple[int, ...], dtype: str) -> Callable[[jax.Array], jax.Array]:
    def draw(key: jax.Array) -> jax.Array:
        if dtype in ("int8", "int32"):
            return jax.random.randint(key, shape, 0, 100, dtype)
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype) * 0.1

    return jit(draw)


def verify_step(
    pair: Pair,
    params: Any,
    state: DecodeState,
    logits_state: None,
    inputs: DecodeInputs,
    block: jax.Array,
) -> tuple[DecodeState, None, Any]:
    """Run the target over a block, cut and commit it: a step without its draft."""
    _, state, out = logits_step(pair, params, state, inputs.rules, block, True)
    return state, None, out


def logits_step(
    pair: Pair, params: Any, state: DecodeState, rules: RowRules, block: jax.Array, drafted: bool
) -> Any:
    """Verify a block, or take a plain step that ignores the block's drafts; return logits too.

    Args:
      drafted: whether the block's tokens after the first are drafts.
    """
    block = block.at[:, 0].set(state.anchor)
    draft = Draft(block)
    if drafted:
        alive = jnp.ones_like(state.anchor, bool)
        draft = Draft(block, alive, jnp.full_like(state.anchor, block.shape[1] - 1))
    inputs = DecodeInputs(rules, draft=draft)
    logits, state, _, out = verify_block(pair, params, state, None, inputs)
    return logits, state, out


def draft_step(
    pair: Pair,
    params: Any,
    state: DecodeState,
    logits_state: None,
    inputs: DecodeInputs,
) -> tuple[DecodeState, None, Any]:
    """Draft a block, and verify none of it."""
    state, _, draft = draft_block(pair, params, state, None, inputs)
    return state, None, draft.block
