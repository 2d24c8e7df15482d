"""Runs the compiled programs of an engine on the one state they share.

It dispatches and waits for nothing, except for drafts of constrained rows.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler import two_devices
from dflash_jax.compiler.build import CompiledPrograms, Executable
from dflash_jax.compiler.keys import LOGITS_VARIANTS, ProgramKey, Step, Variant
from dflash_jax.compiler.memory import tree_bytes
from dflash_jax.compiler.models import empty_state
from dflash_jax.compiler.programs import declare, is_multi_step
from dflash_jax.compiler.settings import isolated_jax_config
from dflash_jax.compiler.sharding import device_mesh, param_shardings, row_shardings
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.decode.inputs import (
    ClearRowsInputs,
    CopyRowInputs,
    DecodeInputs,
    PrefillInputs,
    PromptLogprobsInputs,
    VerifyInputs,
)
from dflash_jax.decode.logits_processing import mask_words
from dflash_jax.decode.pair import Params
from dflash_jax.engine import forced_tokens, lanes
from dflash_jax.engine.forced_tokens import ForcedTokens
from dflash_jax.engine.logits_processing import LogitsProcessor
from dflash_jax.engine.prefix.disk import identity
from dflash_jax.engine.prefix.snapshots import Snapshots
from dflash_jax.engine.sequence import Live
from dflash_jax.errors import CheckpointError
from dflash_jax.plan import Plan
from dflash_jax.quant.layouts import KEPT
from dflash_jax.quant.products import put_in_order
from dflash_jax.state import RowRules, StepOutput


class ModelRunner:
    """Parameters, compiled programs, and the state of all rows.

    Attributes:
      compiled: the programs of the plan, and those of them that are compiled.
      state: of all rows; every step consumes it and returns the next one.
      snapshots: the prefix cache; None if the plan has none.
    """

    def __init__(
        self, target: TargetConfig, drafter: DrafterConfig | None, params: Params, plan: Plan
    ):
        self.target, self.drafter, self.plan = target, drafter, plan
        self.compiled = CompiledPrograms(declare(plan, target, drafter))
        self._copies = jax.default_backend() != "cpu"  # on a CPU, outputs are on the host already
        self._two_devices = plan.two_devices and drafter is not None
        self._mesh = device_mesh(plan)
        self.params = self._place(params)
        self.state: Any = self._empty_state()
        self.snapshots = self._make_snapshots(self.params)
        self._logits = LogitsProcessor(plan.rows, target.vocab_size)
        # Kept on the device, because sending a number in every call takes 0.1 ms.
        self._num_steps = jax.device_put([np.int32(n) for n in range(plan.rounds + 1)])

    @property
    def params_deleted(self) -> bool:
        """Whether parameters were donated to another program."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params))

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each part that stays in memory; may be read by any thread.

        Parts are "weights", "caches" (keys, values and recurrent states of all rows),
        "prefix_cache", and "programs" (machine code; 0 where XLA does not report it, as on a CPU).
        """
        return {
            "weights": tree_bytes(self.params),
            "caches": tree_bytes(self.state),
            "prefix_cache": self.snapshots.cache.bytes if self.snapshots else 0,
            "programs": sum(made.code_bytes for made in list(self.executables.values())),
        }

    @property
    def executables(self) -> dict[ProgramKey, Executable]:
        """The compiled programs."""
        return self.compiled.executables

    def step(
        self,
        step: Step,
        variant: Variant,
        rules: RowRules,
        *chunk: np.ndarray,
        readers: Mapping[int, Live],
        rounds: int = 1,
        first: int = 0,
    ) -> StepOutput:
        """Dispatch a prefill or decode step and start copying its output to the host.

        Args:
          chunk: of a prefill, tokens [B, C], their number [B] and which rows are fresh [B].
          readers: requests by row; their grammars constrain the constrained variant.
          rounds: maximum number of steps, in multi-step programs.
          first: first row of a prefill.
        """
        inputs: Any
        if step == Step.PREFILL:
            row = np.int32(first) if self.plan.fed_rows < self.plan.rows else None
            tokens, num_fed, fresh = chunk
            inputs = PrefillInputs(tokens, num_fed, fresh, rules, row=row)
        else:
            multi = is_multi_step(self.plan, variant)
            inputs = DecodeInputs(rules, num_steps=self._num_steps[rounds] if multi else None)
        if variant == Variant.CONSTRAINED:
            step, inputs = self._constrain(step, inputs, readers, first)
        output = self._run(ProgramKey(step, variant), inputs)
        if self._copies:
            output.packed.copy_to_host_async()
        return output

    def exchange(self, params: Params) -> None:
        """Replace the parameters by others of the same shapes, and drop all cached prefixes.

        Nothing may run meanwhile.

        Raises:
          CheckpointError: they have other names, shapes or dtypes; the engine keeps its own.
        """
        try:
            placed = self._place(params)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"what was given is no tree of parameters ({error}); give one like `engine.params`"
            ) from error
        given, wanted = _leaves(placed), _leaves(self.params)
        if wrong := sorted(given.items() ^ wanted.items()):
            name = wrong[0][0]
            raise CheckpointError(
                f"the parameter {name} is {given.get(name, 'missing')}, but the engine's is"
                f" {wanted.get(name, 'none')}; give a tree like `engine.params`, or load again"
            )
        where = jax.tree.map(lambda leaf: leaf.sharding, self.params)
        placed = jax.device_put(placed, where)
        self.params, self.snapshots = placed, self._make_snapshots(placed)

    def prefetch(self, live: Live) -> None:
        """Start reading a prompt's prefix from disk."""
        if self.snapshots:
            self.snapshots.prefetch(live)

    def restore(self, row: int, live: Live) -> None:
        """Copy cached prompt chunks into a row, continuing at its position."""
        if self.snapshots:
            self.state = self.snapshots.restore(self.executables, self.state, row, live)

    def keep(self, row: int, live: Live, start: int) -> None:
        """Cache the prompt chunk that was just fed to a row from `start` on."""
        if self.snapshots:
            self.snapshots.keep(self.executables, self.state, row, live, start)

    def forget(self, live: Live) -> None:
        """Drop the cached prefixes of a request's prompt."""
        if self.snapshots:
            self.snapshots.forget(live.request.prompt)

    def release(self, live: Live) -> None:
        """Keep or drop the prefixes that a finished request added."""
        if self.snapshots:
            self.snapshots.release(live)

    def set_logits_state(self, row: int, live: Live) -> None:
        """Set a row's penalties, biases and counts to those of a request so far."""
        if program := self.executables.get(ProgramKey(Step.SET_LOGITS_STATE)):
            self._logits.set_row(program, row, live)

    def force_tokens(self, forced: Mapping[int, ForcedTokens]) -> None:
        """Append tokens to rows, all of which must be frozen (R6, R7)."""
        rows, block = self.plan.rows, self.plan.block
        self._change_rows(Step.REPLACE_ANCHOR, forced_tokens.replacements(rows, forced))
        for inputs in forced_tokens.blocks(rows, block, forced):
            self._run(ProgramKey(Step.FORCED_TOKENS), inputs)

    def prompt_logprobs(self, row: int, live: Live) -> None:
        """Dispatch the log-probabilities of the next prompt chunk, to be read by the request."""
        start, prompt = live.fed, live.request.prompt
        places = np.zeros(self.plan.chunk + 1, np.int32)
        part = prompt[start : start + len(places)]
        places[: len(part)] = part
        fresh = np.array([start == 0])
        inputs = PromptLogprobsInputs(np.int32(row), places[None, :-1], places[None, 1:], fresh)
        found = self._run(ProgramKey(Step.PROMPT_LOGPROBS), inputs)
        live.scores = [*(live.scores if start else ()), found]

    def copy_row(self, source: int, destination: int) -> None:
        """Copy the state of one row to another."""
        self._change_rows(Step.COPY_ROW, CopyRowInputs(np.int32(source), np.int32(destination)))

    def clear_rows(self, rows: Iterable[int]) -> None:
        """Clear rows that may hold non-finite numbers, before other requests get them."""
        mask = np.isin(np.arange(self.plan.rows), list(rows))
        self._change_rows(Step.CLEAR_ROWS, ClearRowsInputs(mask))

    def reset(self) -> None:
        """Make a new state, after a failed step consumed the old one."""
        self.drop()
        self.state = self._empty_state()

    def drop(self) -> None:
        """Free the state and all cached prefixes."""
        self.state = None
        self._logits.reset()
        if self.snapshots:
            self.snapshots.cache.clear()  # segments may have been cut from the lost state

    def break_even(self, rules: RowRules) -> float:
        """Return the measured tokens per round from which drafting pays; all rows are frozen."""
        multi = is_multi_step(self.plan, Variant.GREEDY)
        self.state, tokens = lanes.break_even(
            self.executables, self.params, self.state, rules, repeats=multi
        )
        return tokens

    def _run(self, key: ProgramKey, inputs: Any) -> Any:
        """Dispatch a program that runs a model; return its output."""
        logits_state = self._logits.state if key.variant in LOGITS_VARIANTS else None
        self.state, logits_state, output = self.executables[key](
            self.params, self.state, logits_state, inputs
        )
        if logits_state is not None:
            self._logits.keep(logits_state)
        return output

    def _change_rows(self, step: Step, inputs: Any) -> None:
        self.state, _, _ = self.executables[ProgramKey(step)](None, self.state, None, inputs)

    def _constrain(
        self, step: Step, inputs: Any, readers: Mapping[int, Live], first: int
    ) -> tuple[Step, Any]:
        """Return a step with masks in its inputs; a speculative one is drafted and waited for."""
        drafts = np.zeros((self.plan.rows, 0), np.int32)
        if step == Step.SPECULATIVE:
            program = self.executables[ProgramKey(Step.DRAFT, Variant.CONSTRAINED)]
            self.state, _, draft = program(self.params, self.state, None, inputs)
            step, inputs = Step.VERIFY, VerifyInputs(draft, inputs.rules)
            drafts = np.asarray(draft.block)[:, 1:]
        prefill = step == Step.PREFILL
        rows = self.plan.fed_rows if prefill else self.plan.rows
        one = prefill or (step == Step.PLAIN and not self.plan.exact)
        shape = (rows, 1 if one else self.plan.block, mask_words(self.target.vocab_size))
        masks = np.full(shape, 2**32 - 1, np.uint32)
        for row, live in readers.items():
            if live.grammar:
                live.grammar.fill(masks[row - first], drafts[row].tolist())
        return step, dataclasses.replace(inputs, masks=masks)

    def _make_snapshots(self, params: Params) -> Snapshots | None:
        if not self.plan.prefix_cache:
            return None
        made = (self.plan, self.target, self.drafter, params)
        return Snapshots(self.plan, self.compiled.programs, functools.partial(identity, *made))

    @isolated_jax_config()
    def _place(self, params: Params) -> Params:
        """Return the parameters in the layout and on the devices of the plan."""
        params = jax.tree.map(lambda leaf: leaf, params, is_leaf=lambda x: isinstance(x, KEPT))
        put_in_order(params, self.plan.order)  # in the copy of the tree
        if self._two_devices:
            return two_devices.place_params(self.plan, params)
        if self._mesh is not None:
            return jax.device_put(params, param_shardings(self._mesh, params))
        return jax.device_put(params)

    def _empty_state(self) -> Any:
        """Return a `DecodeState`, or a `TwoDeviceState` where each model has its device."""
        shapes = jax.eval_shape(lambda: empty_state(self.plan, self.target, self.drafter))
        empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        if self._two_devices:
            return two_devices.place_state(self.plan, empty)
        return jax.device_put(empty, self._mesh and row_shardings(self._mesh, empty))


def _leaves(params: Params) -> dict[str, str]:
    """Return dtype and shape of every parameter, by its path."""
    found = jax.tree_util.tree_leaves_with_path(params)
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in found)
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in named}
