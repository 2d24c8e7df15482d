"""Declares the programs of a plan: key, pure function, abstract arguments, donated arguments."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.graph import two_devices
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.keys import (
    LOGITS_VARIANTS,
    STEP_VARIANTS,
    ProgramKey,
    Step,
    Variant,
    serving,
)
from dflash_jax.graph.placement import mesh_of, shardings
from dflash_jax.graph.protocols import Draft
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import DecodeState, idle_rules
from dflash_jax.graph.steps import decoding as steps
from dflash_jax.graph.steps import inputs as step_inputs
from dflash_jax.graph.steps import rows
from dflash_jax.graph.steps.drafting import draft
from dflash_jax.graph.steps.logits_processing import mask_words, neutral_logits_state
from dflash_jax.graph.steps.multi_step import multi_step, plain_multi_step
from dflash_jax.graph.steps.pair import Observed, Pair
from dflash_jax.kernels.caches import zero_rows
from dflash_jax.plan import ResolvedPlan

Call = Callable[..., Any]
STATES = (1, 2)  # arguments that are donated: state and logits state


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function with all that is needed to compile it.

    `function(params, state, logits_state, inputs)` returns `(state, logits_state, output)`.
    Arguments and results that a program does not use are None.
    """

    key: ProgramKey
    function: Call
    arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct
    donated: tuple[int, ...] = ()
    placement: Any = None  # shardings of the results, on a mesh or on two devices
    parts: tuple["Program", ...] = ()  # parts of a program that runs on two devices
    call: Call | None = None  # called with the compiled parts and the arguments


def is_multi_step(plan: ResolvedPlan, variant: Variant) -> bool:
    """Return whether a variant's decode programs run more than one step per call."""
    return plan.steps_per_call > 1 and variant not in LOGITS_VARIANTS


@isolated_jax_config()
def declare(
    planned: PlannedPair, *, variants: Sequence[Variant] = STEP_VARIANTS, placed: bool = True
) -> dict[ProgramKey, Program]:
    """Return the programs of a pair under its plan that requests of some variants need.

    Args:
      variants: some of `STEP_VARIANTS`.
      placed: place arguments and results on the plan's mesh; without it, programs tell shapes only.
    """
    plan = planned.plan
    pair = planned.pair
    variants = tuple(dict.fromkeys(serving(variant, plan.kernels) for variant in variants))
    if pair.drafter is None or not plan.two_devices:
        declared = _Declaration(plan, pair, planned.params, planned.state)
        programs = [*declared.all(variants)]
        if planned.wide_prefill:
            wide = declared.prefill(serving(Variant.GREEDY, plan.kernels), planned.wide_prefill)
            programs.append(dataclasses.replace(wide, key=ProgramKey(Step.PREFILL_WIDE)))
        mesh = mesh_of(planned) if placed else None
        if mesh is not None:
            programs = [_over_devices(p, mesh, planned.model_axes) for p in programs]
        return {program.key: program for program in programs}
    target_params, drafter_params = two_devices.split_params(planned.params, pair.target)
    target_state, drafter_state = two_devices.split(planned.state)
    target_pair = pair.with_options(dataclasses.replace(pair.options, keeps_taps=True))
    target_side = _Declaration(plan, target_pair, target_params, target_state)
    drafter_pair = dataclasses.replace(pair, target=two_devices.shared_module(pair.target)[0])
    drafter_side = _Declaration(plan, drafter_pair, drafter_params, drafter_state)
    of_target = [*target_side.without_drafts(variants), *map(target_side.verify, variants)]
    of_drafter = [*map(drafter_side.draft, variants), *drafter_side.row_programs()]
    return two_devices.join(plan, of_target, of_drafter, drafter_side.updates())


def _array(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


_int32, _float32, _flags = (
    functools.partial(_array, dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_)
)


class _Declaration:
    """Programs of one device, or of one mesh."""

    def __init__(self, plan: ResolvedPlan, pair: Pair, params: Any, state: DecodeState):
        self.plan = plan
        self.pair = pair
        self.params = params
        self.state = state
        self.rules = jax.eval_shape(lambda: idle_rules(plan))
        self.vocab: int = pair.target.config.vocab_size
        self.logits_state = jax.eval_shape(lambda: neutral_logits_state(plan.rows, self.vocab))

    def all(self, variants: Sequence[Variant]) -> Iterator[Program]:
        """All programs of a plan whose models share a device."""
        yield from self.without_drafts(variants)
        for variant in variants if self.pair.drafter else ():
            if variant == Variant.CONSTRAINED:
                yield from (self.draft(variant), self.verify(variant))
            else:
                yield self._decode(Step.SPECULATIVE, variant)

    def updates(self) -> dict[int, Program]:
        """Programs that update a drafter on its own device, by the tokens the target was fed."""
        plan = self.plan
        b = self.plan.rows
        width = self.pair.target.config.hidden_size
        by_width = {}
        for fed in sorted({plan.chunk, plan.block, plan.plain_width}):
            tap = jax.ShapeDtypeStruct((b, fed, width), plan.compute_dtype)
            observed = Observed(_int32(b, fed), (tap,) * len(self.pair.taps))
            inputs = step_inputs.UpdateDrafterInputs(
                observed, _flags(b), _flags(b), _int32(b), _int32(b)
            )
            by_width[fed] = self._model(Step.UPDATE_DRAFTER, None, steps.update_drafter, inputs)
        return by_width

    def without_drafts(self, variants: Sequence[Variant]) -> Iterator[Program]:
        """Programs of a target alone."""
        b = self.plan.rows
        chunk = _int32(1, self.plan.chunk)
        forced = step_inputs.ForcedTokensInputs(
            _int32(b, self.plan.block), _int32(b), _flags(b), _int32(b)
        )
        prompt = step_inputs.PromptLogprobsInputs(_int32(), chunk, following=chunk, fresh=_flags(1))
        yield self._model(Step.FORCED_TOKENS, None, steps.forced_tokens, forced)
        yield self._model(Step.PROMPT_LOGPROBS, None, steps.prompt_logprobs, prompt)
        yield from self.row_programs()
        if not set(LOGITS_VARIANTS).isdisjoint(variants):
            bias, prompt, counts = (of(self.vocab) for of in (_float32, _flags, _int32))
            row = step_inputs.SetLogitsStateInputs(
                _int32(), bias, prompt, counts, _float32(3), _flags()
            )
            arguments = (None, None, self.logits_state, row)
            yield Program(ProgramKey(Step.SET_LOGITS_STATE), _set_row, arguments, STATES)
        for variant in variants:
            yield from (self.prefill(variant), self._decode(Step.PLAIN, variant))

    def row_programs(self) -> Iterator[Program]:
        """Programs that change rows without a model: broken rows, equal prompts, prefixes."""
        plan = self.plan
        b = self.plan.rows
        # For caches that may hold non-finite numbers: no mask hides those of recurrent states.
        yield self._rows(Step.CLEAR_ROWS, zero_rows, _flags(b))
        if plan.prefill_rows < plan.rows:
            copy = step_inputs.CopyRowInputs(_int32(), _int32())
            yield self._rows(Step.COPY_ROW, rows.copy_row, copy)
        if plan.prefix_cache:
            drafter = self.pair.proposer
            take = functools.partial(rows.take_segment, chunk=plan.chunk, drafter=drafter)
            put = functools.partial(rows.put_segment, chunk=plan.chunk, drafter=drafter)
            where = step_inputs.SegmentInputs(_int32(), _int32())
            segment = jax.eval_shape(take, self.state, where)
            arguments = (None, self.state, None, where)
            read = functools.partial(_read_rows, take)
            yield Program(ProgramKey(Step.TAKE_SEGMENT), read, arguments)
            inputs = step_inputs.SegmentInputs(_int32(), _int32(), segment)
            yield self._rows(Step.PUT_SEGMENT, put, inputs)

    def prefill(self, variant: Variant, width: int = 0) -> Program:
        """A prefill; a wide one serves every variant, but decides tokens in its own only."""
        plan = self.plan
        fed = self.plan.prefill_rows
        single = fed < plan.rows
        tokens = _int32(fed, width or plan.chunk)
        num_tokens = _int32(fed)
        fresh = _flags(fed)
        row = _int32() if single else None
        masks = self._masks(variant, fed, 1)
        inputs = step_inputs.PrefillInputs(tokens, num_tokens, fresh, self.rules, row, masks)
        program = self._model(Step.PREFILL, variant, steps.prefill, inputs)
        sizes = self.pair.output_sizes(1, drafting=False)
        return _wrapped(program, steps.single_row, sizes=sizes) if single else program

    def _decode(self, step: Step, variant: Variant) -> Program:
        plan = self.plan
        plain = step == Step.PLAIN
        width = plan.plain_width if plain else plan.block
        multi = is_multi_step(plan, variant)
        masks = self._masks(variant, plan.rows, width)
        inputs = step_inputs.DecodeInputs(self.rules, _int32() if multi else None, masks)
        sizes = self.pair.output_sizes(width, drafting=not plain)
        if multi and plain and self.pair.drafter:
            function = functools.partial(
                plain_multi_step, max_steps=plan.steps_per_call, sizes=sizes
            )
            return self._model(step, variant, function, inputs, block=width)
        function = steps.plain if plain else steps.speculative
        program = self._model(step, variant, function, inputs, block=width)
        if not multi:
            return program
        return _wrapped(program, multi_step, max_steps=plan.steps_per_call, sizes=sizes)

    def draft(self, variant: Variant) -> Program:
        """The drafting half of a speculative step."""
        return self._model(Step.DRAFT, variant, draft, step_inputs.DecodeInputs(self.rules))

    def verify(self, variant: Variant) -> Program:
        """The verifying half of a speculative step."""
        b = self.plan.rows
        t = self.plan.block
        copied = _flags(b) if self.pair.copies else None
        logits = _float32(b, t - 1, self.vocab) if self.pair.keeps_logits else None
        block = Draft(_int32(b, t), _flags(b), _int32(b), copied, logits)
        inputs = step_inputs.DecodeInputs(self.rules, masks=self._masks(variant, b, t), draft=block)
        return self._model(Step.VERIFY, variant, steps.verify, inputs)

    def _masks(
        self, variant: Variant, rows: int, num_positions: int
    ) -> jax.ShapeDtypeStruct | None:
        if variant != Variant.CONSTRAINED:
            return None
        return jax.ShapeDtypeStruct((rows, num_positions, mask_words(self.vocab)), jnp.uint32)

    def _model(
        self,
        step: Step,
        variant: Variant | None,
        function: Call,
        inputs: Any,
        *,
        block: int | None = None,
    ) -> Program:
        """Return a program that runs a model.

        Args:
          block: number of tokens of a block; by default the plan's.
        """
        sampled = variant not in (None, Variant.GREEDY)
        width = self.pair.options.block if block is None else block
        options = dataclasses.replace(self.pair.options, sampled=sampled, block=width)
        pair = self.pair.with_options(options)
        processed = variant in LOGITS_VARIANTS and step != Step.DRAFT
        arguments = (self.params, self.state, self.logits_state if processed else None, inputs)
        function = functools.partial(function, pair)
        return Program(ProgramKey(step, variant), function, arguments, STATES)

    def _rows(self, step: Step, function: Call, inputs: Any) -> Program:
        """Return a program that changes rows without a model."""
        function = functools.partial(_change_rows, function)
        return Program(ProgramKey(step), function, (None, self.state, None, inputs), STATES)


def _wrapped(program: Program, wrapper: Call, **static: Any) -> Program:
    function = functools.partial(wrapper, program.function, **static)
    return dataclasses.replace(program, function=function)


def _change_rows(function: Call, params: None, state: Any, logits_state: None, inputs: Any) -> Any:
    return function(state, inputs), None, None


def _read_rows(function: Call, params: None, state: Any, logits_state: None, inputs: Any) -> Any:
    return None, None, function(state, inputs)


def _set_row(params: None, state: None, logits_state: Any, inputs: Any) -> Any:
    return None, logits_state.set_row(inputs), None


def _over_devices(program: Program, mesh: Mesh, axes: Mapping[str, int]) -> Program:
    """Return the program with every argument and result placed on a mesh."""
    results = jax.eval_shape(program.function, *program.arguments)
    return dataclasses.replace(
        program,
        arguments=tuple(two_devices.placed(x, shardings(mesh, x, axes)) for x in program.arguments),
        placement=tuple(shardings(mesh, x, axes) for x in results),
    )
