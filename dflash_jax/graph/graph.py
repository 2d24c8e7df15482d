"""A target and a drafter under a plan: shapes, memory and programs, before and after compiling."""

import dataclasses
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.declared import sentences, unknown_names
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.graph.abstract import PlannedPair, by_path, init_params, path_name
from dflash_jax.graph.build import Executable, compile_programs, lower
from dflash_jax.graph.contract import check_members, check_shapes
from dflash_jax.graph.explain import Explanation, explain, explain_here
from dflash_jax.graph.keys import STEP_VARIANTS, ProgramKey, Step, Variant
from dflash_jax.graph.memory import Budget, budget
from dflash_jax.graph.placement import AXES, named_mesh, place_empty_state, place_params
from dflash_jax.graph.programs import Program, declare, is_multi_step
from dflash_jax.graph.protocols import arrays_of
from dflash_jax.graph.resolve import resolve, resolve_here
from dflash_jax.graph.roofline import DEVICES
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import (
    PromptPart,
    RowRules,
    StepOutput,
    idle_rules,
    prompt_arrays,
    read_output,
)
from dflash_jax.graph.steps.acceptance import frozen
from dflash_jax.graph.steps.inputs import DecodeInputs, PrefillInputs
from dflash_jax.graph.steps.pair import Pair, Params
from dflash_jax.plan import Plan, ResolvedPlan
from dflash_jax.quant.layouts import Interleaved, StructuredWeight

NAMES = ("prefill", "plain", "speculative")


class Graph(PlannedPair):
    """A target and its drafter under a plan, and the programs that decode with them.

    Nothing is compiled and no device memory is used before `compile` and `init_state`. Graphs are
    compared and hashed by their modules and `Plan.shape`, which determine the programs.

    Attributes:
      pair: the modules, with the plan's static options of steps.
      plan: the plan, with every choice made.
      params: shapes and dtypes of all parameters, by role.
      state: shapes and dtypes of a state.
      config: the target's config.
    """

    def __init__(
        self,
        pair: Pair,
        plan: Plan | None = None,
        *,
        device: str = "",
        mesh: Mesh | None = None,
    ):
        """Make every choice that the plan leaves open.

        Args:
          pair: the modules.
          plan: choices that differ from the defaults.
          device: a name of `dj.graph.DEVICES`, to plan for that device; by default this process's.
          mesh: devices to run on, with axes "data" (rows) and "model" (heads and widths), in place
            of `Plan.mesh` over the first ones.

        Raises:
          PlanError: the plan does not fit the models, their obligations or the memory.
        """
        plan = plan or Plan()
        if not isinstance(pair, Pair) or not isinstance(plan, Plan):
            raise PlanError(f"got {pair!r} and {plan!r}; expected a dj.Pair and a dj.Plan")
        if mesh is not None:
            mesh = named_mesh(mesh)
            plan = dataclasses.replace(plan, mesh=tuple(mesh.shape[name] for name in AXES))
        if device and device not in DEVICES:
            raise PlanError(f"device is {device!r}; expected one of {', '.join(DEVICES)}")
        check_members(pair)
        if device and not isinstance(plan, ResolvedPlan):
            machine = DEVICES[device]
            plan = resolve(plan, pair, platform=machine.platform, memory=machine.memory)
        elif not isinstance(plan, ResolvedPlan):
            plan = resolve_here(plan, pair)
        super().__init__(pair, plan, mesh)
        check_shapes(self)
        self._device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        drafter = self.pair.drafter
        named = "no drafter" if drafter is None else type(drafter).__name__
        plan = f"rows={self.plan.rows}, block={self.plan.block}, max_length={self.plan.max_length}"
        return f"<Graph: {type(self.pair.target).__name__}, {named}, {plan}>"

    def __str__(self) -> str:
        return str(self.explain())

    @property
    def _identity(self) -> Any:
        return self.pair, self.plan.shape, self.mesh

    @property
    def budget(self) -> Budget:
        """Bytes of weights, caches and temporaries."""
        return budget(self)

    def explain(self, *, compile: bool = False) -> Explanation:
        """Return a report of programs, bytes and rooflines; it prints as a table.

        Args:
          compile: compile the programs, and report their measured bytes.
        """
        if self._device:
            return explain(self, DEVICES[self._device], compile=compile)
        return explain_here(self, compile=compile)

    def with_plan(self, **changes: Any) -> "Graph":
        """Return the graph of the same modules under a plan with other values of some fields."""
        return Graph(self.pair, dataclasses.replace(self.plan, **changes), mesh=self.mesh)

    # -- parameters and state ----------------------------------------------------------------------

    @isolated_jax_config()
    def init_params(self, key: jax.Array) -> Params:
        """Return fresh parameters, as the modules initialise them, placed as the plan says.

        Those of a Flax NNX module, which has parameters from the start, are the ones that it has.
        """
        return self.place_params(init_params(self.pair, key))

    @isolated_jax_config()
    def place_params(self, params: Params) -> Params:
        """Return parameters in the dtypes, layouts and places that programs expect.

        Args:
          params: trees of the modules' parameters by role, "target" and "drafter", or Flax NNX
            modules in place of them.

        Raises:
          PlanError: parameters are missing, or have other shapes.
        """

        params = arrays_of(params)
        leaves = by_path(params, StructuredWeight)

        def cast(path: Any, wanted: Any) -> Any:
            name = path_name(path)
            leaf = leaves.get(name)
            shape = getattr(leaf, "shape", "missing")
            if shape != wanted.shape:
                raise PlanError(f"the parameter {name} is {shape}; expected {wanted.shape}")
            if isinstance(leaf, StructuredWeight):
                return leaf
            values = wanted.arrays["values"] if isinstance(wanted, Interleaved) else wanted
            return jnp.asarray(leaf, values.dtype)

        if self.specs:
            return place_params(self, params)  # packed before
        is_leaf = lambda x: isinstance(x, Interleaved)  # noqa: E731
        cast_params = jax.tree_util.tree_map_with_path(cast, self.params, is_leaf=is_leaf)
        return place_params(self, cast_params)

    @isolated_jax_config()
    def init_state(self) -> Any:
        """Return a state with every row at position 0, on the plan's devices."""
        return place_empty_state(self)

    def rules(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        max_length: int | None = None,
        drafts: int | None = None,
    ) -> RowRules:
        """Return rules that are the same for all rows, but for their seeds, which are seed + row.

        Args:
          temperature: 0 is greedy.
          top_k, top_p, min_p: filters of sampled tokens; 0, 1 and 0 are off.
          seed: seed of sampled tokens in row 0.
          stop: tokens that end a row; by default the end tokens of the target's config.
          max_length: most tokens of prompt and output together; by default the plan's.
          drafts: maximum number of drafts to verify; by default all of a block.

        Raises:
          RequestError: there are more stop tokens than the plan has room for.
        """
        plan = self.plan
        rows = self.plan.rows
        stops = [*(getattr(self.config, "eos_token_ids", ()) if stop is None else stop)]
        if len(stops) > plan.stop_slots:
            raise RequestError(
                f"there are {len(stops)} stop tokens; give at most {plan.stop_slots}"
            )
        idle = jax.tree.map(np.array, idle_rules(plan))
        idle.stop_ids[:, : len(stops)] = stops
        most = plan.max_length if max_length is None else min(max_length, plan.max_length)
        verified = plan.block - 1 if drafts is None else min(drafts, plan.block - 1)
        seeds = [divmod((seed + row) % 2**64, 2**32) for row in range(rows)]
        return dataclasses.replace(
            idle,
            limit=np.full(rows, most, np.int32),
            max_drafts=np.full(rows, verified, np.int32),
            temperature=np.full(rows, temperature, np.float32),
            top_k=np.full(rows, top_k, np.int32),
            top_p=np.full(rows, top_p, np.float32),
            min_p=np.full(rows, min_p, np.float32),
            seed=np.array(seeds, np.uint32),
        )

    # -- programs ----------------------------------------------------------------------------------

    def programs(self, variants: Sequence[Variant] = STEP_VARIANTS) -> dict[ProgramKey, Program]:
        """Return the programs of some variants: pure functions with abstract arguments."""
        return declare(self, variants=variants)

    @isolated_jax_config()
    def lower(self, name: str) -> jax.stages.Lowered:
        """Trace and lower a program, without compiling it.

        Args:
          name: such as "speculative", or "speculative[sampled]".

        Raises:
          PlanError: there is no such program, or it has parts on two devices.
        """
        known = self.programs()
        [key] = keys_of([name], known, self.plan.kernels, "this graph")
        program = known[key]
        if program.call is not None:
            raise PlanError(f"{name} runs on two devices; lower the parts of `graph.programs()`")
        return lower(program)

    def compile(self, names: Collection[str] = NAMES) -> "GraphPrograms":
        """Compile programs ahead of time.

        Args:
          names: names of programs, as for `lower`; without a variant, the greedy one.

        Raises:
          PlanError: there is no such program, or one would copy its donated state.
        """
        known = self.programs()
        keys = keys_of(names, known, self.plan.kernels, "this graph")
        return GraphPrograms(self, compile_programs(known[key] for key in keys))

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        names: Collection[str] | None = None,
        params: Params | None = None,
        tokenizer: Any = None,
        overwrite: bool = False,
    ) -> None:
        """Write programs to one file, from which `dj.load_exported` runs them without the modules.

        The file also has the plan, all shapes and the tokenizer. It is for this platform and this
        version of the package, and readable by later versions of JAX for as long as JAX promises
        for `jax.export`.

        Args:
          names: names of programs, as for `compile`; by default all.
          params: parameters from `place_params`, or an engine's, to be stored in the file. By
            default they are given to `ExportedGraph.place_params`.
          tokenizer: the target's, as in `engine.tokenizer`.
          overwrite: replace an existing file.

        Raises:
          PlanError: the plan has native kernels or several devices, the parameters do not fit, or
            the package flatbuffers is missing.
          CheckpointError: the file exists or cannot be written; nothing is left of it.
        """
        from dflash_jax.graph.export import export  # imports `jax.export`, which few need

        export(
            self,
            path,
            names=names,
            params=params,
            tokenizer=tokenizer,
            overwrite=overwrite,
        )


def keys_of(
    names: Collection[str], programs: Collection[ProgramKey], kernels: str, place: str
) -> list[ProgramKey]:
    """Return the keys of named programs, each once.

    A name without a variant is that of the greedy one. A name may have any variant that the program
    serves.

    Args:
      kernels: the plan's.
      place: what has the programs, for errors.

    Raises:
      PlanError: there is no such program, or `names` is one name.
    """
    if isinstance(names, str):
        raise PlanError(f"names is {names!r}; expected a list of names, such as [{names!r}]")
    known = {str(key): key for key in programs}
    for key in programs:
        served = key.needed_by(kernels) if key.variant else ()
        known |= {str(ProgramKey(key.step, variant)): key for variant in served}
        if Variant.GREEDY in served:
            known[str(key.step)] = key
    if problems := unknown_names(names, known, f"program of {place}"):
        raise PlanError(sentences(problems))
    return [*dict.fromkeys(known[name] for name in names)]


@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a call for all rows; reading it waits for the device.

    Attributes:
      step: the device's output.
    """

    step: StepOutput
    ended: jax.Array

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """The newly decided tokens of each row, in order."""
        steps = read_output(self.step)
        tokens: list[list[int]] = [[] for _ in steps[0]]
        for step in steps:
            for row, output in enumerate(step):
                tokens[row] += output.tokens
        return tokens

    @property
    def num_tokens(self) -> np.ndarray:
        """Number of newly decided tokens of each row."""
        return np.array([len(tokens) for tokens in self.tokens])

    @property
    def done(self) -> np.ndarray:
        """Whether each row is at a stop token or its limit, or was given no prompt."""
        return np.asarray(self.ended)


class GraphPrograms(Mapping[str, Executable]):
    """Compiled programs of a graph, or of an exported one; calling them only dispatches.

    Every call consumes the state that it is given and returns the next one.
    """

    def __init__(self, graph: Any, executables: Mapping[ProgramKey, Executable]):
        self.graph = graph
        self._executables = {str(key): made for key, made in executables.items()}
        self._rules = graph.rules()

    def __getitem__(self, name: str) -> Executable:
        return self._executables[name]

    def __iter__(self) -> Any:
        return iter(self._executables)

    def __len__(self) -> int:
        return len(self._executables)

    def prefill(
        self,
        params: Params,
        state: Any,
        tokens: Sequence[int],
        *,
        row: int = 0,
        rules: RowRules | None = None,
    ) -> tuple[Any, Output]:
        """Feed a prompt to a row, chunk by chunk, as a new text, and decide the token after it.

        Args:
          tokens: the prompt, at least one token.
          rules: rules of all rows, from `Graph.rules`; by default greedy.

        Raises:
          RequestError: the prompt is empty, has unknown tokens or leaves no room for an output.
        """
        plan = self.graph.plan
        rules = rules or self._rules
        ids = self._checked_prompt(tokens, row)
        program = self._program(Step.PREFILL, rules)
        is_single = plan.prefill_rows < plan.rows
        out: Any = None
        start = 0
        while start < len(ids):
            run, width, count = self._prefill_call(program, start, len(ids) - start)
            part = PromptPart(0 if is_single else row, start, ids[start : start + count])
            inputs = PrefillInputs(
                *prompt_arrays([part], plan.prefill_rows, width),
                rules,
                row=np.int32(row) if is_single else None,
            )
            state, _, out = run(self._whole(params), state, None, inputs)
            start += count
        packed = out.packed
        if is_single:
            packed = jnp.zeros((plan.rows, packed.shape[-1]), packed.dtype).at[row].set(packed[0])
        return state, self._output(state, rules, dataclasses.replace(out, packed=packed))

    def _checked_prompt(self, tokens: Sequence[int], row: int) -> np.ndarray:
        """Return the ids of a prompt, or raise RequestError."""
        rows = self.graph.plan.rows
        most = self.graph.plan.max_length - 1
        vocab_size = self.graph.config.vocab_size
        ids = np.asarray(tokens, np.int32).reshape(-1)
        known = 0 < len(ids) <= most and 0 <= ids.min() <= ids.max() < vocab_size
        if not known or not 0 <= row < rows:
            raise RequestError(
                f"got {len(ids)} tokens for row {row}; expected 1 to {most} tokens of 0 to"
                f" {vocab_size - 1}, and a row below {rows}"
            )
        return ids

    def _prefill_call(
        self, program: Executable, start: int, left: int
    ) -> tuple[Executable, int, int]:
        """Return the program that feeds a prompt's next tokens, its width, and how many it feeds.

        Args:
          program: the program that feeds a chunk.
          start: number of tokens that were fed before.
          left: number of tokens that are left.
        """
        wide = self._executables.get(Step.PREFILL_WIDE)
        if wide is not None:
            variant = program.key.variant or Variant.GREEDY
            count = self.graph.wide_part(start, left, variant)
            if count:
                return wide, self.graph.wide_prefill, count
        chunk = self.graph.plan.chunk
        return program, chunk, min(left, chunk)

    def plain(
        self, params: Params, state: Any, *, rules: RowRules | None = None, steps: int = 1
    ) -> tuple[Any, Output]:
        """Decode a token of each row without the drafter, or `steps` of them."""
        return self._decode(Step.PLAIN, params, state, rules, steps)

    def speculative(
        self, params: Params, state: Any, *, rules: RowRules | None = None, steps: int = 1
    ) -> tuple[Any, Output]:
        """Draft, verify, decide and commit a block of each row, in one dispatch.

        Args:
          rules: rules of all rows, from `Graph.rules`; by default greedy.
          steps: number of steps, at most `Plan.steps_per_call`.
        """
        return self._decode(Step.SPECULATIVE, params, state, rules, steps)

    def _decode(
        self, step: Step, params: Params, state: Any, rules: RowRules | None, steps: int
    ) -> tuple[Any, Output]:
        rules = rules or self._rules
        plan = self.graph.plan
        if not 1 <= steps <= plan.steps_per_call:
            raise RequestError(f"steps is {steps}; expected 1 to {plan.steps_per_call}")
        multi = is_multi_step(plan, Variant.GREEDY)
        live = dataclasses.replace(rules, limit=_live(_first(state).position, rules.limit))
        inputs = DecodeInputs(live, np.int32(steps) if multi else None)
        state, _, out = self._program(step, rules)(self._whole(params), state, None, inputs)
        return state, self._output(state, rules, out)

    def _whole(self, params: Params) -> Params:
        """Return parameters of both roles; a drafter without any may be left out."""
        graph = self.graph
        absent = [role for role in graph.params if role not in params]
        for role in absent:
            if jax.tree.leaves(graph.params[role]):
                raise PlanError(f"params has no {role!r}; make it by `graph.place_params`")
        return params | {role: {} for role in absent} if absent else params

    def _output(self, state: Any, rules: RowRules, out: StepOutput) -> Output:
        part = _first(state)
        return Output(out, _ended(part.anchor, part.position, rules))

    def _program(self, step: Step, rules: RowRules) -> Executable:
        sampled = bool((np.asarray(rules.temperature) > 0).any())
        for variant in (Variant.SAMPLED,) if sampled else (Variant.GREEDY, Variant.SAMPLED):
            if (name := str(ProgramKey(step, variant))) in self._executables:
                return self._executables[name]
        kind = "[sampled]" if sampled else ""
        raise PlanError(f"{step}{kind} is not compiled; name it in `graph.compile`")


def _first(state: Any) -> Any:
    """Return the part of a state that has positions, on two devices that of the target."""
    return getattr(state, "target_state", state)


@jax.jit
def _live(position: jax.Array, limit: jax.Array) -> jax.Array:
    """Return limits under which rows without a prompt are frozen."""
    return jnp.where(position > 0, limit, 0)


@jax.jit
def _ended(anchor: jax.Array, position: jax.Array, rules: RowRules) -> jax.Array:
    return frozen(anchor, position, rules) | (position == 0)
