"""Declares the programs of a plan: key, pure function, abstract arguments, donated arguments."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.compiler import two_devices
from dflash_jax.compiler.keys import LOGITS_VARIANTS, STEP_VARIANTS, ProgramKey, Step, Variant
from dflash_jax.compiler.models import (
    abstract_params,
    build_pair,
    empty_state,
    idle_rules,
    model_axes,
)
from dflash_jax.compiler.settings import isolated_jax_config
from dflash_jax.compiler.sharding import (
    device_mesh,
    param_shardings,
    placed,
    row_shardings,
    whole,
)
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.decode import rows, steps
from dflash_jax.decode.inputs import (
    ClearRowsInputs,
    CopyRowInputs,
    DecodeInputs,
    ForcedTokensInputs,
    PrefillInputs,
    PromptLogprobsInputs,
    PutSegmentInputs,
    ReplaceAnchorInputs,
    SetLogitsStateInputs,
    TakeSegmentInputs,
    UpdateDrafterInputs,
    VerifyInputs,
)
from dflash_jax.decode.logits_processing import mask_words, neutral_logits_state
from dflash_jax.decode.pair import Pair
from dflash_jax.decode.prompt_logprobs import prompt_logprobs
from dflash_jax.nn.decoder import Decoder
from dflash_jax.nn.draft import Draft
from dflash_jax.plan import Plan
from dflash_jax.state import DecodeState

STATES = (1, 2)  # arguments that are donated: state and logits state


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function with all that is needed to compile it.

    `function(params, state, logits_state, inputs)` returns `(state, logits_state, output)`.
    Arguments and results that a program does not use are None.
    """

    key: ProgramKey
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct
    donated: tuple[int, ...] = ()
    placement: Any = None  # shardings of the results, on several devices
    parts: tuple["Program", ...] = ()  # of a program that runs on two devices
    call: Callable[..., Any] | None = None  # called with the compiled parts and the arguments


def is_multi_step(plan: Plan, variant: Variant) -> bool:
    """Return whether a variant's decode programs run several steps per call."""
    return plan.steps_per_call > 1 and variant not in LOGITS_VARIANTS


@isolated_jax_config()
def declare(
    plan: Plan,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    variants: Sequence[Variant] = STEP_VARIANTS,
) -> dict[ProgramKey, Program]:
    """Return the programs of a resolved plan.

    Args:
      variants: those of `STEP_VARIANTS` to declare.
    """
    pair = build_pair(target, drafter, exact=plan.exact, taps_at=plan.taps_at)
    params = abstract_params(plan, target, drafter)
    state = jax.eval_shape(lambda: empty_state(plan, target, drafter))
    if drafter is not None and plan.two_devices:
        shared = {"target": two_devices.shared_params(params["target"])}
        state, drafter_state = two_devices.split(state)
        drafter_side = _Declaration(
            plan,
            dataclasses.replace(pair, target=Decoder(target)),
            shared | {"drafter": params["drafter"]},
            drafter_state,
        )
        params = {"target": params["target"]}
        pair = dataclasses.replace(pair, two_devices=True)
        target_side = _Declaration(plan, pair, params, state)
        return two_devices.join(
            plan,
            _by_key([*target_side.halves(variants), *target_side.row_programs()]),
            _by_key([*drafter_side.drafts(variants), *drafter_side.row_programs()]),
            drafter_side.updates(),
        )
    side = _Declaration(plan, pair, params, state)
    programs = [*side.whole_steps(variants), *side.row_programs()]
    mesh = device_mesh(plan)
    if mesh is not None:
        axes = model_axes(target, drafter)
        programs = [_over_devices(p, mesh, axes) for p in programs]
    return _by_key(programs)


def _by_key(programs: Iterable[Program]) -> dict[ProgramKey, Program]:
    return {program.key: program for program in programs}


def _int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _float32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _flags(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


_SCALAR = _int32()


class _Declaration:
    """Programs of one device, or of one mesh."""

    def __init__(self, plan: Plan, pair: Pair, params: Any, state: DecodeState):
        self.plan, self.pair, self.params, self.state = plan, pair, params, state
        self.config = pair.target.config
        self.rules = jax.eval_shape(lambda: idle_rules(plan))
        self.logits_state = jax.eval_shape(
            lambda: neutral_logits_state(plan.rows, self.config.vocab_size)
        )

    def whole_steps(self, variants: Sequence[Variant]) -> Iterator[Program]:
        """Every step of a plan whose models share a device."""
        yield from self._shared_steps(variants)
        for variant in variants if self.pair.drafter else ():
            if variant == Variant.CONSTRAINED:
                yield self._draft(variant)
                yield self._verify(variant)
            else:
                yield self._decode(
                    Step.SPECULATIVE, variant, steps.speculative, **self._draft_options
                )

    def halves(self, variants: Sequence[Variant]) -> Iterator[Program]:
        """The steps of a target whose drafter is on another device."""
        yield from self._shared_steps(variants)
        yield from map(self._verify, variants)

    def drafts(self, variants: Sequence[Variant]) -> Iterator[Program]:
        """The drafting half of speculative steps."""
        return map(self._draft, variants)

    def updates(self) -> dict[int, Program]:
        """Programs that update a drafter on its own device, by the tokens the target was fed."""
        plan, b = self.plan, self.plan.rows
        found = {}
        for width in sorted({plan.chunk, plan.block, _plain_width(plan)}):
            tap = jax.ShapeDtypeStruct((b, width, self.config.hidden_size), plan.dtype)
            taps = (tap,) * len(self.pair.taps)
            inputs = UpdateDrafterInputs(taps, _flags(b), position=_int32(b), anchor=_int32(b))
            found[width] = self._model(Step.UPDATE_DRAFTER, None, steps.update_drafter, inputs)
        return found

    def row_programs(self) -> Iterator[Program]:
        """Programs that change rows without a model: pending tokens, broken rows, prefixes."""
        plan, b = self.plan, self.plan.rows
        anchor = ReplaceAnchorInputs(rows=_flags(b), anchor=_int32(b))
        yield self._rows(Step.REPLACE_ANCHOR, rows.replace_anchor, anchor)
        yield self._rows(Step.CLEAR_ROWS, rows.clear_rows, ClearRowsInputs(rows=_flags(b)))
        if plan.fed_rows < plan.rows:
            yield self._rows(Step.COPY_ROW, rows.copy_row, CopyRowInputs(_SCALAR, _SCALAR))
        if plan.prefix_cache:
            take = functools.partial(rows.take_segment, chunk=plan.chunk)
            put = functools.partial(rows.put_segment, chunk=plan.chunk)
            where = TakeSegmentInputs(row=_SCALAR, start=_SCALAR)
            segment = jax.eval_shape(take, self.state, where)
            arguments, read = (None, self.state, None, where), functools.partial(_read_rows, take)
            yield Program(ProgramKey(Step.TAKE_SEGMENT), read, arguments)
            yield self._rows(Step.PUT_SEGMENT, put, PutSegmentInputs(_SCALAR, _SCALAR, segment))

    def _shared_steps(self, variants: Sequence[Variant]) -> Iterator[Program]:
        """The steps that draft nothing."""
        plan, b = self.plan, self.plan.rows
        forced = ForcedTokensInputs(_int32(b, plan.block), num_fed=_int32(b), anchor=_int32(b))
        yield self._model(Step.FORCED_TOKENS, None, steps.forced_tokens, forced)
        chunk = _int32(1, plan.chunk)
        prompt = PromptLogprobsInputs(_SCALAR, tokens=chunk, following=chunk, fresh=_flags(1))
        yield self._model(Step.PROMPT_LOGPROBS, None, prompt_logprobs, prompt, width=plan.block)
        if not set(LOGITS_VARIANTS).isdisjoint(variants):
            yield self._set_logits_state()
        for variant in variants:
            yield self._prefill(variant)
            yield self._decode(Step.PLAIN, variant, steps.plain, width=_plain_width(plan))

    def _prefill(self, variant: Variant) -> Program:
        plan, fed = self.plan, self.plan.fed_rows
        inputs = PrefillInputs(
            tokens=_int32(fed, plan.chunk),
            num_fed=_int32(fed),
            fresh=_flags(fed),
            rules=self.rules,
            row=_SCALAR if fed < plan.rows else None,
            masks=self._masks(variant, fed, 1),
        )
        program = self._model(Step.PREFILL, variant, steps.prefill, inputs)
        if fed == plan.rows:
            return program
        single = functools.partial(steps.single_row, program.function)
        return dataclasses.replace(program, function=single)

    def _decode(
        self, step: Step, variant: Variant, function: Callable[..., Any], width: int, **static: Any
    ) -> Program:
        multi = is_multi_step(self.plan, variant)
        inputs = DecodeInputs(
            self.rules,
            num_steps=_SCALAR if multi else None,
            masks=self._masks(variant, self.plan.rows, width),
        )
        program = self._model(step, variant, function, inputs, width=width, **static)
        if not multi:
            return program
        run = functools.partial(
            steps.multi_step, program.function, max_steps=self.plan.steps_per_call, width=width
        )
        return dataclasses.replace(program, function=run)

    def _draft(self, variant: Variant) -> Program:
        inputs = DecodeInputs(self.rules)
        return self._model(Step.DRAFT, variant, steps.draft, inputs, **self._draft_options)

    @property
    def _draft_options(self) -> dict[str, Any]:
        return {"width": self.plan.block, "min_survival": self.plan.min_survival}

    def _verify(self, variant: Variant) -> Program:
        b, t = self.plan.rows, self.plan.block
        greedy = variant == Variant.GREEDY
        q = None if greedy else _float32(b, t - 1, self.config.vocab_size)
        draft = Draft(_int32(b, t), q=q, finite=_flags(b), num_drafts=_int32(b))
        inputs = VerifyInputs(draft, self.rules, masks=self._masks(variant, b, t))
        return self._model(Step.VERIFY, variant, steps.verify, inputs)

    def _set_logits_state(self) -> Program:
        vocab = self.config.vocab_size
        inputs = SetLogitsStateInputs(
            row=_SCALAR,
            bias=_float32(vocab),
            prompt=_flags(vocab),
            counts=_int32(vocab),
            penalties=_float32(3),
            reports=_flags(),
        )
        arguments = (None, None, self.logits_state, inputs)
        return Program(ProgramKey(Step.SET_LOGITS_STATE), _set_row, arguments, STATES)

    def _masks(self, variant: Variant, rows: int, places: int) -> jax.ShapeDtypeStruct | None:
        if variant != Variant.CONSTRAINED:
            return None
        shape = (rows, places, mask_words(self.config.vocab_size))
        return jax.ShapeDtypeStruct(shape, jnp.uint32)

    def _model(
        self,
        step: Step,
        variant: Variant | None,
        function: Callable[..., Any],
        inputs: Any,
        **static: Any,
    ) -> Program:
        """Return a program that runs a model."""
        if variant:
            static["sampled"] = variant != Variant.GREEDY
        has_logits_state = variant in LOGITS_VARIANTS and step != Step.DRAFT
        logits_state = self.logits_state if has_logits_state else None
        run = functools.partial(function, self.pair, **static)
        arguments = (self.params, self.state, logits_state, inputs)
        return Program(ProgramKey(step, variant), run, arguments, STATES)

    def _rows(self, step: Step, function: Callable[..., Any], inputs: Any) -> Program:
        """Return a program that changes rows without a model."""
        run = functools.partial(_change_rows, function)
        return Program(ProgramKey(step), run, (None, self.state, None, inputs), STATES)


def _plain_width(plan: Plan) -> int:
    return plan.block if plan.exact else 1


def _change_rows(
    function: Callable[..., Any], params: None, state: Any, logits_state: None, inputs: Any
) -> Any:
    return function(state, inputs), None, None


def _read_rows(
    function: Callable[..., Any], params: None, state: Any, logits_state: None, inputs: Any
) -> Any:
    return None, None, function(state, inputs)


def _set_row(params: None, state: None, logits_state: Any, inputs: SetLogitsStateInputs) -> Any:
    return None, logits_state.set_row(inputs), None


def _over_devices(program: Program, mesh: Mesh, axes: Mapping[str, int]) -> Program:
    """Return the program with every argument and result placed on a mesh."""

    def shardings(tree: Any) -> Any:
        if isinstance(tree, dict):
            return param_shardings(mesh, tree, axes)
        if isinstance(tree, DecodeState):
            return row_shardings(mesh, tree)
        return whole(mesh, tree)

    results = jax.eval_shape(program.function, *program.arguments)
    return dataclasses.replace(
        program,
        arguments=tuple(placed(x, shardings(x)) for x in program.arguments),
        placement=tuple(map(shardings, results)),
    )
