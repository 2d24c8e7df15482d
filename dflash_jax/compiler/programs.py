"""Which programs a plan needs: name, pure function, abstract arguments, what is donated."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.compiler import two_devices as apart
from dflash_jax.compiler.plan import CacheMaker, Plan
from dflash_jax.compiler.settings import undisturbed
from dflash_jax.compiler.sharding import (
    device_mesh,
    param_shardings,
    placed,
    row_shardings,
    whole,
)
from dflash_jax.config import (
    ALWAYS_FLOAT32,
    AUTO,
    LATE,
    DrafterConfig,
    TargetConfig,
    paired,
)
from dflash_jax.decode import prompt_logprobs as scoring
from dflash_jax.decode import steps
from dflash_jax.decode.block import Pair, Params
from dflash_jax.decode.logits_processing import neutral_shaping, set_row
from dflash_jax.decode.snapshot import put_segment, take_segment
from dflash_jax.models import build_drafter, build_target, drafter_caches, target_caches
from dflash_jax.nn.decoder import Decoder
from dflash_jax.nn.layers import MODEL_AXES, ModelAxis
from dflash_jax.quant.layouts import Spec, is_matrix, spec
from dflash_jax.quant.products import abstract, in_order
from dflash_jax.state import CHOICES, DecodeState, RowRules

# Lanes, the suffixes of their programs' names: greedy; drawn; either, from logits the request
# shapes; likewise, and from masks the host makes. Each serves the requests of those before it.
GREEDY, SAMPLED, SHAPED, MASKED = "", "_sampled", "_shaped", "_masked"
LANES = (GREEDY, SAMPLED)
DECODING = ("speculative", "plain", "plain1")  # programs of one decode step, or several
ALL_LANES = (*LANES, SHAPED, MASKED)  # the last two are compiled when first asked for


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function with everything that is needed to compile it."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct
    donated: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ALL_LANES  # that need it
    placement: Any = None  # shardings of the results, where there are several devices
    parts: tuple["Program", ...] = ()  # of a program that runs on two devices
    call: Callable[..., Any] | None = None  # given the parts, compiled, and the arguments


def build_pair(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    exact: bool = True,
    taps_at: str = AUTO,
) -> Pair:
    """The modules of both configs; what the drafter's leaves open is the target's."""
    drafting = build_drafter(paired(target, drafter)) if drafter else None
    return Pair(build_target(target), drafting, exact, LATE if taps_at == AUTO else taps_at)


def empty_state(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> DecodeState:
    """A state in which every row stands at position 0."""

    return DecodeState(
        target=target_caches(target, CacheMaker(plan)),
        draft=drafter_caches(drafter, CacheMaker(plan)) if drafter else (),
        position=jnp.zeros((plan.rows,), jnp.int32),
        anchor=jnp.zeros((plan.rows,), jnp.int32),
    )


def abstract_params(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Any]:
    """Shapes and dtypes of all parameters; no memory is used.

    Token ids stay integers, and what `ALWAYS_FLOAT32` names stays float32.
    """
    dtype, kernel = jnp.dtype(plan.dtype), plan.kernels != "xla"
    specs = weight_specs(plan, target, drafter)

    def planned(path: Any, x: jax.ShapeDtypeStruct) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in specs:
            return abstract(x.shape, specs[name], dtype, kernel=kernel)
        kept = jnp.issubdtype(x.dtype, jnp.integer) or path[-1].key in ALWAYS_FLOAT32
        stored = jax.ShapeDtypeStruct(x.shape, x.dtype if kept else dtype)
        return in_order(stored, plan.order) if is_matrix(path[-1].key) else stored

    return jax.tree_util.tree_map_with_path(planned, _shapes(target, drafter))


def weight_specs(
    plan: Plan, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, Spec]:
    """How each packed parameter is packed, by its path with the role in front."""
    if plan.weights == "packed":
        return dict(plan.stored)
    if plan.weights == "float":
        return {}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_shapes(target, drafter)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if chosen := spec(plan.weights, name, leaf.shape):
            found[name] = chosen
    return found


def _shapes(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, Any]:
    return {role: tree["params"] for role, tree in _variables(target, drafter).items()}


def model_axes(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, int]:
    """Return the axis of each weight that a mesh may split, by path with the role."""
    found = {role: tree.get(MODEL_AXES, {}) for role, tree in _variables(target, drafter).items()}
    leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, ModelAxis))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.axis for path, leaf in leaves
    }


def _variables(target: TargetConfig, drafter: DrafterConfig | None) -> dict[str, Any]:
    found = {"target": _target_shapes(target)}
    return found | ({"drafter": _drafter_shapes(target, drafter)} if drafter else {})


@functools.lru_cache(maxsize=16)
@undisturbed()
def _target_shapes(target: TargetConfig) -> dict[str, Any]:
    """Shapes of a target's variables, as float32; tracing a large model takes seconds."""
    return jax.eval_shape(lambda: _init_target(target, jax.random.key(0)))


@functools.lru_cache(maxsize=16)
@undisturbed()
def _drafter_shapes(target: TargetConfig, drafter: DrafterConfig) -> dict[str, Any]:
    return jax.eval_shape(lambda: _init_drafter(target, drafter, jax.random.key(0)))


def init_params(target: TargetConfig, drafter: DrafterConfig | None, *, seed: int) -> Params:
    """Random float32 parameters, for tests, benchmarks and training."""
    keys = jax.random.split(jax.random.key(seed))
    params = {"target": _init_target(target, keys[0])["params"]}
    if drafter is not None:
        params["drafter"] = _init_drafter(target, drafter, keys[1])["params"]
    return params


_LEAST = Plan(max_length=2, block=2, chunk=1, dtype="float32", rings=False)


def _init_target(target: TargetConfig, key: jax.Array) -> Params:
    caches, start = target_caches(target, CacheMaker(_LEAST)), jnp.zeros((1,), jnp.int32)
    module: Any = build_target(target)
    return module.init(key, jnp.zeros((1, 1), jnp.int32), caches, start)


def _init_drafter(target: TargetConfig, drafter: DrafterConfig, key: jax.Array) -> Params:
    x, start = jnp.zeros((1, 1, target.hidden_size), jnp.float32), jnp.zeros((1,), jnp.int32)
    caches = drafter_caches(drafter, CacheMaker(_LEAST))
    return build_drafter(paired(target, drafter)).init(key, x, caches, start)


def idle_rules(plan: Plan) -> RowRules:
    """Rules under which every row is frozen."""
    b = plan.rows
    return RowRules(
        stop_ids=jnp.full((b, plan.stop_slots), -1, jnp.int32),
        limit=jnp.zeros((b,), jnp.int32),
        drafts=jnp.full((b,), plan.block - 1, jnp.int32),
        temperature=jnp.zeros((b,), jnp.float32),
        top_k=jnp.zeros((b,), jnp.int32),
        top_p=jnp.ones((b,), jnp.float32),
        min_p=jnp.zeros((b,), jnp.float32),
        seed=jnp.zeros((b,), jnp.uint32),
        choices=jnp.full((b, CHOICES), -1, jnp.int32),
        opening=jnp.full((b,), -1, jnp.int32) if plan.call_odds else None,
    )


def words(target: TargetConfig) -> int:
    """Words of 32 bits that hold a bit for every token."""
    return -(-target.vocab_size // 32)


def shaping_row(vocab: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of `set_row` after the shaping: row, biases, tokens of the prompt, counts of
    output tokens, penalties, whether log-probabilities are reported."""
    shapes = (((), "int32"), ((vocab,), "float32"), ((vocab,), "bool"), ((vocab,), "int32"))
    return tuple(jax.ShapeDtypeStruct(*kind) for kind in (*shapes, ((3,), "float32"), ((), "bool")))


def repeats(plan: Plan, lane: str) -> bool:
    """Whether a lane's decode programs make several steps in a call, and are told how many."""
    return plan.rounds > 1 and lane in LANES


@undisturbed()
def declare(
    plan: Plan,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    lanes: Sequence[str] = LANES,
) -> dict[str, Program]:
    """Every program of a resolved plan, by name. The state is donated to each."""
    pair = build_pair(target, drafter, exact=plan.exact, taps_at=plan.taps_at)
    params = abstract_params(plan, target, drafter)
    state = jax.eval_shape(lambda: empty_state(plan, target, drafter))
    drafting = pair, params, state
    split = plan.apart and drafter is not None
    if split:
        lent = dataclasses.replace(pair, target=Decoder(target))
        borrowing = {"target": apart.borrowed(params["target"]), "drafter": params["drafter"]}
        state, there = apart.halves(state)
        drafting = lent, borrowing, there
        pair, params = dataclasses.replace(pair, apart=True), {"target": params["target"]}
    rules = jax.eval_shape(lambda: idle_rules(plan))
    count, flag = rules.limit, jax.ShapeDtypeStruct((plan.rows,), jnp.bool_)
    shaping = jax.eval_shape(lambda: neutral_shaping(plan.rows, target.vocab_size))

    def tokens(width: int, rows: int = plan.rows) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def few(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((plan.fed_rows,), x.dtype)

    def program(
        name: str, step: Callable[..., Any], *rest: Any, lane: str = GREEDY, **static: Any
    ) -> Program:
        arguments, donated = (params, state, *rest), (1,)
        if name in DECODING and repeats(plan, lane):
            step = functools.partial(steps.several, step, most=plan.rounds)
            arguments = (params, state, jax.ShapeDtypeStruct((), jnp.int32), *rest)
        elif lane == MASKED:
            step = functools.partial(steps.masked, step)
            places = {"prefill": 1, "verify": plan.block}.get(name, width)
            rows = plan.fed_rows if name == "prefill" else plan.rows
            mask = jax.ShapeDtypeStruct((rows, places, words(target)), jnp.uint32)
            arguments, donated = (params, state, shaping, mask, *rest), (1, 2)
        elif lane == SHAPED:
            step = functools.partial(steps.shaped, step)
            arguments, donated = (params, state, shaping, *rest), (1, 2)
        run = functools.partial(step, pair, **static)
        if name == "prefill" and plan.fed_rows < plan.rows:
            before = len(arguments) - len(rest)
            run = functools.partial(steps.in_row, run, carried=before - 2)
            row = jax.ShapeDtypeStruct((), jnp.int32)
            arguments = (*arguments[:before], row, *rest)
        return Program(name + lane, run, arguments, donated, (lane,))

    dictated = (params, state, tokens(plan.block), count, count)
    chunk, one = tokens(plan.chunk, 1), jax.ShapeDtypeStruct((), jnp.int32)
    scored = (params, state, one, chunk, chunk, jax.ShapeDtypeStruct((1,), jnp.bool_))
    score = functools.partial(scoring.score, pair, width=plan.block)
    width = plan.block if plan.exact else 1
    plain = "plain" if plan.exact else "plain1"
    programs = [
        Program("forced", functools.partial(steps.forced, pair), dictated, (1,)),
        Program("score", score, scored, (1,)),
        *_row_programs(plan, state),
    ]
    others: list[Program] = []  # of the drafter's device
    if not {SHAPED, MASKED}.isdisjoint(lanes):
        row = shaping_row(target.vocab_size)
        programs.append(Program("shape", set_row, (shaping, *row), (0,), (SHAPED, MASKED)))
    for lane in lanes:
        static: dict[str, Any] = {"sampled": lane != GREEDY, "lane": lane}
        fed = tokens(plan.chunk, plan.fed_rows), *(few(x) for x in (count, flag))
        programs += [
            program("prefill", steps.prefill, *fed, rules, **static),
            program(plain, steps.plain, rules, width=width, **static),
        ]
        if drafter is None:
            continue
        wide: dict[str, Any] = {"width": plan.block, "min_survival": plan.min_survival}
        if lane != MASKED and not split:
            programs.append(program("speculative", steps.speculative, rules, **static, **wide))
            continue
        module, *rest = drafting
        run = functools.partial(steps.draft, module, sampled=lane != GREEDY, **wide)
        draft = Program("draft" + lane, run, (*rest, rules), (1,), (lane,))
        q = jax.ShapeDtypeStruct((plan.rows, plan.block - 1, target.vocab_size), jnp.float32)
        drafted = (tokens(plan.block), q if lane != GREEDY else None, flag, count)
        (others if split else programs).append(draft)
        programs.append(program("verify", steps.verify, drafted, rules, **static))
    if split:
        module, borrowing, there = drafting
        for fed in sorted({plan.chunk, plan.block, width}):
            tap = jax.ShapeDtypeStruct((plan.rows, fed, target.hidden_size), plan.dtype)
            news = ((tap,) * len(pair.taps), flag, count, count)
            run = functools.partial(steps.follow, module)
            others.append(Program(f"follow_{fed}", run, (borrowing, there, *news), (1,)))
        others += _row_programs(plan, there)
        named = ({p.name: p for p in half} for half in (programs, others))
        return apart.join(plan, *named, between=MASKED)
    mesh = device_mesh(plan)
    if mesh is None:
        return {p.name: p for p in programs}
    axes = model_axes(target, drafter)
    return {p.name: over_devices(p, mesh, axes) for p in programs}


def _row_programs(plan: Plan, state: DecodeState) -> list[Program]:
    """What changes rows without a model: pending tokens, broken rows, prefixes."""
    flag, one = jax.ShapeDtypeStruct((plan.rows,), jnp.bool_), jax.ShapeDtypeStruct((), jnp.int32)
    programs = [
        Program("replace", steps.replace, (state, flag, state.anchor), (0,)),
        Program("wipe", steps.wipe, (state, flag), (0,)),
    ]
    if plan.fed_rows < plan.rows:
        programs.append(Program("copy_row", steps.copy_row, (state, one, one), (0,)))
    if plan.prefix_cache:
        take = functools.partial(take_segment, chunk=plan.chunk)
        put = functools.partial(put_segment, chunk=plan.chunk)
        segment = jax.eval_shape(take, state, one, one)
        programs.append(Program("take_segment", take, (state, one, one)))
        programs.append(Program("put_segment", put, (state, one, one, segment), (0,)))
    return programs


def over_devices(program: Program, mesh: Mesh, axes: Mapping[str, int]) -> Program:
    """Return the program with every argument and result placed on a mesh (see `model_axes`)."""

    def shardings(tree: Any) -> Any:
        if isinstance(tree, dict):
            return param_shardings(mesh, tree, axes)
        if isinstance(tree, DecodeState):
            return row_shardings(mesh, tree)
        return whole(mesh, tree)

    made = jax.eval_shape(program.function, *program.arguments)
    several = isinstance(made, tuple)
    return dataclasses.replace(
        program,
        arguments=tuple(placed(x, shardings(x)) for x in program.arguments),
        placement=tuple(map(shardings, made)) if several else shardings(made),
    )
