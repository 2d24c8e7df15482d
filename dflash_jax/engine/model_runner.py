"""Runs an engine's compiled programs on the one state they share; knows nothing of queues.

Everything here dispatches and waits for nothing, but for the drafts that masks are made from.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler import two_devices as apart
from dflash_jax.compiler.build import Executable
from dflash_jax.compiler.memory import tree_bytes
from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import (
    ALL_LANES,
    DECODING,
    GREEDY,
    MASKED,
    SHAPED,
    Params,
    declare,
    empty_state,
    model_axes,
    repeats,
    words,
)
from dflash_jax.compiler.settings import undisturbed
from dflash_jax.compiler.sharding import device_mesh, param_shardings, row_shardings
from dflash_jax.compiler.variants import CompiledPrograms
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine import lanes
from dflash_jax.engine.forced_tokens import Dictated, dictate
from dflash_jax.engine.logits_processing import Shaper
from dflash_jax.engine.prefix.disk import identity
from dflash_jax.engine.prefix.snapshots import Snapshots
from dflash_jax.engine.sequence import Live
from dflash_jax.errors import CheckpointError
from dflash_jax.quant.layouts import KEPT
from dflash_jax.quant.products import put_in_order
from dflash_jax.state import RowRules, StepOutput


class Runner:
    """Parameters, compiled programs, and the state of all rows.

    Attributes:
      compiled: the programs of the plan, and the executables made of them so far.
      state: of all rows; donated to every step, which gives it back.
      snapshots: the way to the prefix cache; None where the plan keeps none.
    """

    def __init__(
        self, target: TargetConfig, drafter: DrafterConfig | None, params: Params, plan: Plan
    ):
        self.target, self.drafter, self.plan = target, drafter, plan
        self.compiled = CompiledPrograms(declare(plan, target, drafter, lanes=ALL_LANES))
        self._copies = jax.default_backend() != "cpu"  # there answers are on the host already
        self._apart = plan.apart and drafter is not None
        self._mesh = device_mesh(plan)
        self.params = self._place(params)
        self.state: Any = self._empty_state()
        self.snapshots = self._make_snapshots(self.params)
        self._shaper = Shaper(plan.rows, target.vocab_size)
        # Kept there, as to send a number in every call takes 0.1 ms.
        self._counts = jax.device_put([np.int32(n) for n in range(plan.rounds + 1)])

    @property
    def bereft(self) -> bool:
        """Whether somebody else's program took parameters away."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params))

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each part that stays in memory; any thread may ask.

        Parts are "weights", "caches" (keys, values and recurrent states of all rows),
        "prefix_cache", and "programs" (machine code; 0 where XLA does not say, as on a CPU).
        """
        return {
            "weights": tree_bytes(self.params),
            "caches": tree_bytes(self.state),
            "prefix_cache": self.snapshots.cache.bytes if self.snapshots else 0,
            "programs": sum(made.code_bytes for made in list(self.executables.values())),
        }

    @property
    def executables(self) -> dict[str, Executable]:
        """What was compiled so far, by name."""
        return self.compiled.executables

    def step(
        self,
        name: str,
        lane: str,
        rules: RowRules,
        *arguments: Any,
        readers: Mapping[int, Live],
        rounds: int = 1,
        first: int = 0,
    ) -> StepOutput:
        """Dispatches a step in a lane; its answer is on its way to the host.

        Args:
          readers: by row, those whose grammars the masked lane has to ask.
          rounds: most steps to make of those that can be made in one call.
          first: of the rows that are fed.
        """
        carried: tuple[Any, ...] = ()
        if name in DECODING and repeats(self.plan, lane):
            arguments = (self._counts[rounds], *arguments)
        elif name == "prefill" and self.plan.fed_rows < self.plan.rows:
            arguments = (np.int32(first), *arguments)
        if lane == MASKED:
            name, arguments, masks = self._make_masks(name, rules, arguments, readers, first)
            carried = (self._shaper.shaping, masks)
        elif lane == SHAPED:
            carried = (self._shaper.shaping,)
        program = self.executables[name + lane]
        made = program(self.params, self.state, *carried, *arguments, rules)
        self.state, output = made[0], made[-1]
        if carried:
            self._shaper.keep(made[1])
        if self._copies:
            output.packed.copy_to_host_async()
        return output

    def exchange(self, params: Params) -> None:
        """Goes on with other parameters of the same shapes; what is kept of prompts is not theirs.

        Nothing may run meanwhile.

        Raises:
          CheckpointError: they are made otherwise; the engine keeps those it has.
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
                f" {wanted.get(name, 'none')}; give a tree like `engine.params`, or load anew"
            )
        where = jax.tree.map(lambda leaf: leaf.sharding, self.params)
        placed = jax.device_put(placed, where)
        self.params, self.snapshots = placed, self._make_snapshots(placed)

    def recall(self, live: Live) -> None:
        """Begins to read what the disk keeps of a prompt, where the plan keeps any."""
        if self.snapshots:
            self.snapshots.recall(live)

    def restore(self, row: int, live: Live) -> None:
        """Gives a row what is kept of its prompt, as far as it goes on where the row stands."""
        if self.snapshots:
            self.state = self.snapshots.restore(self.executables, self.state, row, live)

    def keep(self, row: int, live: Live, start: int) -> None:
        """Keeps the prompt chunk that was just fed to a row from `start` on."""
        if self.snapshots:
            self.snapshots.keep(self.executables, self.state, row, live, start)

    def forget(self, live: Live) -> None:
        """Drops what is kept of a request's prompt."""
        if self.snapshots:
            self.snapshots.forget(live.request.prompt)

    def settle(self, live: Live) -> None:
        """A request ended: what it added to the prefix cache stays, or leaves."""
        if self.snapshots:
            self.snapshots.settle(live)

    def shape(self, row: int, live: Live) -> None:
        """Makes a row's penalties and biases those of a request as far as it has come."""
        if "shape" in self.executables:
            self._shaper.set_row(self.executables["shape"], row, live)

    def dictate(self, dictated: Mapping[int, Dictated]) -> None:
        """Has rows go on behind tokens the host decided."""
        size = {"rows": self.plan.rows, "block": self.plan.block}
        self.state = dictate(self.executables, self.params, self.state, dictated, **size)

    def score(self, row: int, live: Live) -> None:
        """Asks how likely the next chunk of a prompt is; the request has the answers."""
        start, prompt = live.fed, live.request.prompt
        places = np.zeros(self.plan.chunk + 1, np.int32)
        part = prompt[start : start + len(places)]
        places[: len(part)] = part
        chunk = places[None, :-1], places[None, 1:], np.array([start == 0])
        self.state, found = self.executables["score"](
            self.params, self.state, np.int32(row), *chunk
        )
        live.scores = [*(live.scores if start else ()), found]

    def copy_row(self, of: int, to: int) -> None:
        """Has a row know what another does."""
        self.state = self.executables["copy_row"](self.state, np.int32(of), np.int32(to))

    def wipe(self, rows: Iterable[int]) -> None:
        """Clears rows whose caches may hold non-finite numbers, before anyone else gets them."""
        mask = np.isin(np.arange(self.plan.rows), list(rows))
        self.state = self.executables["wipe"](self.state, mask)

    def reset(self) -> None:
        """Makes a new state after a failed step, which took the donated one with it."""
        self.drop()
        self.state = self._empty_state()

    def drop(self) -> None:
        """Lets go of what is left of the state, and of what is kept of prompts."""
        self.state = None
        self._shaper.reset()
        if self.snapshots:
            self.snapshots.cache.clear()  # segments may have been cut from what is lost

    def break_even(self, rules: RowRules) -> float:
        """Tokens a drafted round must decide to pay, measured; every row stands still."""
        measured = lanes.break_even(
            self.executables, self.params, self.state, rules, repeats=repeats(self.plan, GREEDY)
        )
        self.state, tokens = measured
        return tokens

    def _make_snapshots(self, params: Params) -> Snapshots | None:
        if not self.plan.prefix_cache:
            return None
        made = (self.plan, self.target, self.drafter, params)
        return Snapshots(self.plan, self.compiled.programs, functools.partial(identity, *made))

    @undisturbed()
    def _place(self, params: Params) -> Params:
        """Parameters where the plan wants them, as it wants them."""
        params = jax.tree.map(lambda leaf: leaf, params, is_leaf=lambda x: isinstance(x, KEPT))
        put_in_order(params, self.plan.order)  # in the copy of the tree
        if self._apart:
            return apart.place_params(self.plan, params)
        if self._mesh is not None:
            axes = model_axes(self.target, self.drafter)
            return jax.device_put(params, param_shardings(self._mesh, params, axes))
        return jax.device_put(params)

    def _empty_state(self) -> Any:
        """A `DecodeState`, or its two `Halves` where target and drafter have a device each."""
        shapes = jax.eval_shape(lambda: empty_state(self.plan, self.target, self.drafter))
        empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        if self._apart:
            return apart.place_state(self.plan, empty)
        return jax.device_put(empty, self._mesh and row_shardings(self._mesh, empty))

    def _make_masks(
        self,
        name: str,
        rules: RowRules,
        arguments: tuple[Any, ...],
        readers: Mapping[int, Live],
        first: int,
    ) -> tuple[str, tuple[Any, ...], np.ndarray]:
        """A step's masks [B, T, W]; of a speculative one the drafts are made, and waited for."""
        drafts = np.zeros((self.plan.rows, 0), np.int32)
        if name == "speculative":
            draft = self.executables["draft" + MASKED]
            self.state, drafted = draft(self.params, self.state, rules)
            name, arguments, drafts = "verify", (drafted,), np.asarray(drafted[0])[:, 1:]
        places = 1 if name in ("prefill", "plain1") else self.plan.block
        rows = self.plan.fed_rows if name == "prefill" else self.plan.rows
        shape = (rows, places, words(self.target))
        masks = np.full(shape, 2**32 - 1, np.uint32)
        for row, live in readers.items():
            if live.grammar:
                live.grammar.fill(masks[row - first], drafts[row].tolist())
        return name, arguments, masks


def _leaves(params: Params) -> dict[str, str]:
    """Type and shape of every parameter, by its path."""
    found = jax.tree_util.tree_leaves_with_path(params)
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in found)
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in named}
