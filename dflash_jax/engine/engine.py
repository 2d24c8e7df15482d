"""Drives the compiled programs: admits requests to rows, runs steps, hands out tokens.

The host stays one step ahead: it dispatches the next step before it reads the last one's
answer. That is safe because the device cuts every row by itself; a row that has ended is
frozen until it is given a new request.

Any thread may submit, cancel and iterate streams. Steps are made by one thread at a time:
whoever calls `advance` while another does waits for its turn. A server gives that work to a
thread of its own, which calls `advance` while the engine is `busy`.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.build import Executable, compile_programs
from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import (
    ALL_LANES,
    GREEDY,
    MASKED,
    SAMPLED,
    SHAPED,
    Params,
    declare,
    empty_state,
    words,
)
from dflash_jax.compiler.sharding import device_mesh, param_shardings, row_shardings
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine import controller
from dflash_jax.engine.controller import Restart
from dflash_jax.engine.dictation import Dictated, dictate
from dflash_jax.engine.events import EventLog
from dflash_jax.engine.lanes import break_even, lane_of, make_rules
from dflash_jax.engine.live import Live
from dflash_jax.engine.prefix_cache import PrefixCache
from dflash_jax.engine.recovery import OFF, CancelCell
from dflash_jax.engine.request import Request, check_fits, request_of
from dflash_jax.engine.result import Result, TokenLogprob
from dflash_jax.engine.shaper import Shaper, likely_tokens
from dflash_jax.engine.snapshots import Snapshots
from dflash_jax.engine.stream import Stream
from dflash_jax.engine.structured import Grammars
from dflash_jax.errors import QueueFullError, RequestError
from dflash_jax.state import DecodeState, RowRules, RowStep, StepOutput, read_output
from dflash_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int]


DICTATING = {"forced", "replace"}  # programs that requests without recovery never need


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step whose answer was not read yet."""

    output: StepOutput
    readers: dict[int, Live]  # by row: who was in it, and hears the answer
    decode: bool
    drafting: frozenset[int] = frozenset()  # rows that drafted


class Engine:
    """A target, its drafter and a plan, ready to generate. Made by `dflash_jax.load`."""

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        params: Params,
        plan: Plan,
        *,
        tokenizer: Tokenizer | None = None,
    ):
        self.target, self.drafter, self.params, self.plan = target, drafter, params, plan
        self.tokenizer = tokenizer
        self.programs = declare(plan, target, drafter, lanes=ALL_LANES)
        self.executables: dict[str, Executable] = {}
        self.compile_s = 0.0  # seconds spent compiling so far
        self._mesh = device_mesh(plan)
        if self._mesh is not None:
            self.params = jax.device_put(params, param_shardings(self._mesh, params))
        self._state = self._empty_state()
        self._waiting: collections.deque[Live] = collections.deque()
        self._rows: list[Live | None] = [None] * plan.rows
        self._flights: collections.deque[_Flight] = collections.deque()
        self._rules: RowRules | None = None
        self._prefilled_last = False
        self._lock = threading.RLock()  # over queue, rows and requests; never held while waiting
        self._driving, self._compiling = threading.Lock(), threading.Lock()
        self._shaper = Shaper(plan.rows, target.vocab_size)
        self._grammars = Grammars(tokenizer, target.vocab_size, target.eos_token_ids)
        self._snapshots = Snapshots(plan, self.programs) if plan.prefix_cache else None
        self.break_even = 0.0  # tokens a drafted round must decide to pay; 0 until measured
        self.events = EventLog()

    # -- what a caller uses -------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Generates to the end; arguments as for `stream`."""
        return self.generate_many([prompt], **options)[0]

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        cancel: CancelCell | None = None,
        **options: Any,
    ) -> list[Result]:
        """Generates for several prompts, as many side by side as the plan has rows.

        Args:
          n: answers for each prompt, one after the other in the list; answer i draws with
            seed + i. Those that start together share the calls of one prefill.
        """
        lives: list[Live] = []
        try:
            for request in [r for p in prompts for r in self._requests(p, n, **options)]:
                live = self._live(request, cancel)
                while self.queued >= self.plan.queue:
                    self.advance()
                lives += self._enqueue([live])
            while not all(live.done for live in lives):
                self.advance()
        finally:
            for live in lives:
                self.cancel(live)
        return [live.result() for live in lives]

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Generates piece by piece.

        Args:
          prompt: a text, or token ids. Text is encoded as it is; see `chat_ids` for templates.
          max_tokens: most tokens to generate.
          temperature, top_p, top_k, min_p, seed: sampling; temperature 0 is greedy. Without a
            seed every call draws a new one.
          repetition_penalty: divides what speaks for tokens of prompt and output; 1 is off.
          frequency_penalty, presence_penalty: taken from the logits of tokens that were said,
            for each time and once; 0 is off. Greedy requests are penalised as well.
          logit_bias: numbers to add to the logits of token ids.
          logprobs: report the log-probability of every token, and of this many alternatives.
          structured: what the text must follow: {"json": a schema}, {"regex": a pattern},
            {"choice": texts} or {"grammar": a Lark grammar}. Needs the extra `structured`.
          stop: text or texts that end the output; they are not part of it.
          stop_token_ids: ids that end the output, besides the model's own end tokens.
          ignore_eos: let the model's end tokens pass.
          speculative: False decodes without drafting; the tokens are the same.
          recovery: rules that act when the model goes silent, stalls or loops; None is off.
            Where output is structured, those that dictate tokens or overrule ends are off.
          tools, tool_choice: the tools the prompt offers, in any API's shape; recovery may
            begin a call of one of them.
          cancel: a cell by which anyone, from any thread, may end the request. Unlike `close`,
            it also keeps what the request added out of the prefix cache.

        Raises:
          RequestError: the arguments cannot be served; says why.
          QueueFullError: as many requests wait as the plan allows.
          ComputeError: while iterating, if the target's logits stop being finite, or if the
            device fails twice.
        """
        return Stream(self.submit(prompt, **options), self.advance, self.cancel)

    def chat_ids(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Prompt ids of a conversation, by the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("this model ships no tokenizer; give token ids instead of messages")
        return self.tokenizer.chat(messages, **variables)

    def warm_up(
        self,
        *,
        sampled: bool = False,
        shaped: bool = False,
        masked: bool = False,
        recovery: bool = False,
        measure: bool = False,
    ) -> float:
        """Compiles the greedy programs, and the others if asked; returns the seconds.

        Args:
          sampled: also those that draw tokens.
          shaped: also those with penalties, biases and log-probabilities.
          masked: also those of structured output.
          recovery: also those that `recovery` needs.
          measure: time drafted against plain steps, so that greedy requests of an exact plan
            leave drafting alone while it does not pay; changes speed, never a token.
        """
        lanes = {GREEDY: True, SAMPLED: sampled, SHAPED: shaped, MASKED: masked}
        needed = [lane for lane, wanted in lanes.items() if wanted]
        seconds = sum(self._compile(lane, dictating=recovery) for lane in needed)
        if measure and self.drafter is not None and self.plan.exact:
            self._measure()
        return seconds

    def _measure(self) -> None:
        with self._driving, self._lock, jax.no_tracing():
            if self.busy:
                raise RequestError("requests are running; measure before the first of them")
            rules = make_rules(self.plan, self._rows, ())
            measured = break_even(self.executables, self.params, self._state, rules)
            self._state, self.break_even = measured

    # -- the loop -----------------------------------------------------------------------------

    def submit(self, prompt: Prompt, **options: Any) -> Live:
        """Queues a request; `advance` runs it. Arguments and errors as for `stream`."""
        return self.submit_several(prompt, 1, **options)[0]

    def submit_several(
        self, prompt: Prompt, n: int, *, cancel: CancelCell | None = None, **options: Any
    ) -> list[Live]:
        """Queues n requests for one prompt, all of them or none; answer i draws with seed + i."""
        requests = self._requests(prompt, n, **options)
        return self._enqueue([self._live(request, cancel) for request in requests])

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Kept prefixes and their counters; None where the plan keeps none."""
        return None if self._snapshots is None else self._snapshots.cache

    @property
    def queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Requests that have a row."""
        return sum(live is not None for live in self._rows)

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        return bool(self._waiting or self._flights or any(self._rows))

    def _requests(self, prompt: Prompt, n: int, **options: Any) -> list[Request]:
        """The checked requests of n answers."""
        if type(n) is not int or n < 1:
            raise RequestError(f"n is {n!r}; expected an integer of at least 1")
        options["speculative"] = options.get("speculative", True) and self.drafter is not None
        first = request_of(prompt, self.target, self.tokenizer, **options)
        check_fits(first, self.plan, self.target)
        seeds = [(first.seed + i) % 2**32 for i in range(n)]
        return [dataclasses.replace(first, seed=seed) for seed in seeds]

    def _live(self, request: Request, cancel: CancelCell | None) -> Live:
        """A request ready to run: its grammar made, its programs compiled."""
        structure = request.structured
        grammar = None if structure is None else self._grammars.make(structure)
        free = self.plan.exact and request.temperature == 0  # to change lanes by the clock (R11)
        cost = self.break_even if free else 0.0
        live = Live(request, self.tokenizer, grammar, cancel=cancel, break_even=cost)
        dictating = request.recovery != OFF
        live.stats.compile_s = self._compile(lane_of(request), dictating=dictating)
        return live

    def _enqueue(self, lives: list[Live]) -> list[Live]:
        """Queues requests, all of them or none."""
        with self._lock:
            if len(self._waiting) + len(lives) > self.plan.queue:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait already and {len(lives)} more were given,"
                    f" but the plan lets {self.plan.queue} wait; try again later, or load with a"
                    " larger queue"
                )
            self._waiting += lives
        return lives

    def cancel(self, live: Live) -> None:
        """Ends a request wherever it stands; does nothing if it already ended."""
        with self._lock:
            if not live.done:
                live.take(controller.Cancelled())
                self._release(live)

    def advance(self) -> None:
        """One turn: dispatch a step if any row can use one, then read what is due."""
        with self._driving:
            try:
                with jax.no_tracing():
                    self._turn()
            except jax.errors.JaxRuntimeError as error:
                with self._lock:
                    self._rebuild(error)

    def _turn(self) -> None:
        with self._lock:
            self._end_what_nobody_waits_for()
            self._admit()
            dispatched = self._dispatch_prefill() or self._dispatch_decode()
        ahead = self.plan.lookahead if dispatched and self._lane != MASKED else 0
        while len(self._flights) > ahead:
            flight = self._flights.popleft()
            steps = read_output(flight.output) if flight.readers else []
            with self._lock:
                self._read(flight, steps)

    def _empty_state(self) -> DecodeState:
        shapes = jax.eval_shape(lambda: empty_state(self.plan, self.target, self.drafter))
        empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return jax.device_put(empty, self._mesh and row_shardings(self._mesh, empty))

    def _rebuild(self, error: Exception) -> None:
        """After a failed step its donated state is lost: prompts and outputs are fed anew (R12).

        A request that saw two failures ends, whoever caused them.
        """
        self._flights.clear()
        self._state, self._rules = self._empty_state(), None
        self._shaper.reset()
        if self._snapshots:
            self._snapshots.cache.clear()  # segments may have been cut from what is lost
        for live in filter(None, list(self._rows)):
            if live.fail(error):
                self._release(live)
            elif live.rebuilding:
                self._compile(lane_of(live.request), dictating=True)

    def _end_what_nobody_waits_for(self) -> None:
        """Cancelled requests and those whose time is up, queued ones included."""
        for live in [*self._waiting, *filter(None, self._rows)]:
            if live.handle.should_cancel():
                live.leave()
            elif live.overdue:
                live.stats.recovery["deadline"] += 1
                self._report(live, ("deadline",))
                live.take(controller.Cancelled(controller.Finish.LENGTH))
            if live.done:
                self._release(live)

    def _admit(self) -> None:
        for row, live in enumerate(self._rows):
            if live is None and self._waiting:
                self._rows[row] = live = self._waiting.popleft()
                live.start()
                self._rules = None

    def _dispatch_prefill(self) -> bool:
        """Feeds the next chunk of every unfinished prompt, in turns with decoding."""
        feeding = {r: x for r, x in enumerate(self._rows) if x and x.fed < len(x.request.prompt)}
        if not feeding or (self._prefilled_last and self._decoding()):
            self._prefilled_last = False
            return False
        self._prefilled_last = True
        rows, chunk = self.plan.rows, self.plan.chunk
        tokens, count = np.zeros((rows, chunk), np.int32), np.zeros((rows,), np.int32)
        fresh = np.zeros((rows,), bool)
        finished: dict[int, Live] = {}
        starts = {}
        for row, live in feeding.items():
            if self._snapshots:
                self._state = self._snapshots.restore(self.executables, self._state, row, live)
            starts[row] = live.fed
            part = live.request.prompt[live.fed : live.fed + chunk]
            tokens[row, : len(part)], count[row], fresh[row] = part, len(part), live.fed == 0
            live.fed += len(part)
            if live.fed == len(live.request.prompt):
                finished[row] = live
                self._rules = None
                if "shape" in self.executables:
                    self._shaper.set_row(self.executables["shape"], row, live)
        self._run("prefill", tokens, count, fresh, readers=finished)
        if self._snapshots:
            for row, live in feeding.items():
                self._snapshots.keep(self.executables, self._state, row, live, starts[row])
        return True

    @property
    def _lane(self) -> str:
        """The lane of the next step: the least that serves every row."""
        needed = [lane_of(live.request) for live in self._rows if live]
        return max(needed, key=ALL_LANES.index, default=GREEDY)

    def _dispatch_decode(self) -> bool:
        decoding = self._decoding()
        if not decoding or self._may_all_end():
            return False
        drafting = frozenset(row for row, live in decoding.items() if live.speculates)
        name = "speculative" if drafting else "plain" if self.plan.exact else "plain1"
        self._run(name, readers=decoding, drafting=drafting, decode=True)
        return True

    def _decoding(self) -> dict[int, Live]:
        return {
            row: live
            for row, live in enumerate(self._rows)
            if live and live.fed == len(live.request.prompt) and not live.rebuilding
        }

    def _may_all_end(self) -> bool:
        """Whether unread steps may already bring every row to its length limit."""
        unread = [live for flight in self._flights for live in flight.readers.values()]
        steps = collections.Counter(map(id, unread))
        return bool(self._flights) and all(
            len(live.request.prompt) + live.state.emitted + steps[id(live)] * self.plan.block
            >= live.limit
            for live in self._decoding().values()
        )

    def _run(
        self,
        name: str,
        *arguments: Any,
        readers: dict[int, Live],
        drafting: frozenset[int] = frozenset(),
        decode: bool = False,
    ) -> None:
        """Dispatches a program; its answer is read later."""
        lane, carried = self._lane, ()
        self._rules = self._rules or make_rules(self.plan, self._rows, self._decoding())
        if lane == MASKED:
            name, arguments, masks = self._make_masks(name, arguments, readers)
            carried = (self._shaper.shaping, masks)
        elif lane == SHAPED:
            carried = (self._shaper.shaping,)
        program = self.executables[name + lane]
        made = program(self.params, self._state, *carried, *arguments, self._rules)
        self._state, output = made[0], made[-1]
        if carried:
            self._shaper.keep(made[1])
        output.packed.copy_to_host_async()
        self._flights.append(_Flight(output, dict(readers), decode, drafting))

    def _make_masks(
        self, name: str, arguments: tuple[Any, ...], readers: Mapping[int, Live]
    ) -> tuple[str, tuple[Any, ...], np.ndarray]:
        """A step's masks [B, T, W]; of a speculative one the drafts are made, and waited for."""
        drafts = np.zeros((self.plan.rows, 0), np.int32)
        if name == "speculative":
            draft = self.executables["draft" + MASKED]
            self._state, drafted = draft(self.params, self._state, self._rules)
            name, arguments, drafts = "verify", (drafted,), np.asarray(drafted[0])[:, 1:]
        places = 1 if name in ("prefill", "plain1") else self.plan.block
        shape = (self.plan.rows, places, words(self.target))
        masks = np.full(shape, 2**32 - 1, np.uint32)
        for row, live in readers.items():
            if live.grammar:
                live.grammar.fill(masks[row], drafts[row].tolist())
        return name, arguments, masks

    def _read(self, flight: _Flight, steps: list[RowStep]) -> None:
        broken = []
        dictated: dict[int, Dictated] = {}
        for row, live in flight.readers.items():
            if live.done:
                continue
            step = steps[row]
            if live.rebuilding and step.finite:
                dictated[row] = live.rebuilt()
                self._rules = None
                continue
            if row in flight.drafting:
                live.stats.count_round(len(step.tokens), step.drafts, self.plan.block - 1)
            elif flight.decode:
                live.stats.plain_steps += bool(step.tokens)
            likely = likely_tokens(flight.output, row, live)[: len(step.tokens)]
            if told := self._hear(live, _event(flight, row, step), likely):
                dictated[row] = told
            if live.done:
                self._release(live)
            if not step.finite:
                broken.append(row)
                if self._snapshots:
                    self._snapshots.cache.forget(live.request.prompt)
        if broken:
            self._wipe(broken)
        if dictated:
            self._dictate(dictated)

    def _hear(
        self,
        live: Live,
        event: controller.Prefilled | controller.Stepped,
        likely: list[TokenLogprob],
    ) -> Dictated | None:
        """Lets a request judge a step; what it dictates in return."""
        before = live.limit, live.speculates
        effects = live.hear(event, likely)
        self._report(live, effects.notes)
        if before != (live.limit, live.speculates):
            self._rules = None
        if effects.restart is Restart.SAVED and isinstance(event, controller.Prefilled):
            return self._hear(live, event, likely)  # nothing was fed since: this is the saved state
        if effects.restart:
            self._feed_again(live, effects.restart)
        elif effects.replace is not None or effects.force:
            ids = live.state.ids
            pending = ids[len(ids) - len(effects.force) - 1]
            return Dictated(pending, effects.replace is not None, effects.force)
        return None

    def _feed_again(self, live: Live, restart: Restart) -> None:
        """Has a prompt fed once more; what its row says meanwhile is heard by nobody."""
        fresh = restart is Restart.FRESH
        if fresh and self._snapshots:
            self._snapshots.cache.forget(live.request.prompt)
        live.feed_again(uncached=fresh)
        self._rules = None
        for flight in self._flights:
            for row in [row for row, reader in flight.readers.items() if reader is live]:
                del flight.readers[row]

    def _dictate(self, dictated: dict[int, Dictated]) -> None:
        """Has rows go on behind tokens the host decided."""
        size = {"rows": self.plan.rows, "block": self.plan.block}
        self._state = dictate(self.executables, self.params, self._state, dictated, **size)
        for row in dictated:
            live = self._rows[row]
            if live and live.request.shaped:
                self._shaper.set_row(self.executables["shape"], row, live)

    def _report(self, live: Live, notes: Sequence[str]) -> None:
        for note in notes:
            self.events.report(
                note,
                live.number,
                directory=live.request.recovery.log_directory,
                prompt_tokens=len(live.request.prompt),
                output_tokens=live.state.emitted,
            )

    def _release(self, live: Live) -> None:
        """Lets go of a request that ended, wherever it was."""
        if live in self._waiting:
            self._waiting.remove(live)
        self._rows = [None if x is live else x for x in self._rows]
        self._rules = None
        if self._snapshots:
            self._snapshots.settle(live)

    def _wipe(self, rows: list[int]) -> None:
        """Clears rows whose caches may hold non-finite numbers, before anyone else gets them."""
        mask = np.isin(np.arange(self.plan.rows), rows)
        self._state = self.executables["wipe"](self._state, mask)

    def _compile(self, lane: str, *, dictating: bool = False) -> float:
        """Compiles what a lane still lacks; returns the seconds it took."""
        with self._compiling:
            started = time.perf_counter()
            names = {name for name, program in self.programs.items() if lane in program.lanes}
            names -= set(self.executables) if dictating else DICTATING | set(self.executables)
            if not names:
                return 0.0
            self.executables |= compile_programs(self.programs[name] for name in sorted(names))
            seconds = time.perf_counter() - started
            self.compile_s += seconds
            return seconds


def _event(flight: _Flight, row: int, step: RowStep) -> controller.Prefilled | controller.Stepped:
    """What a step's answer means to the request in a row."""
    if not flight.decode:
        restored = flight.readers[row].stats.cached_tokens > 0
        return controller.Prefilled(step.tokens[0], step.floor, step.finite, restored)
    drafts = step.drafts if row in flight.drafting else 0
    return controller.Stepped(step.tokens, step.finite, step.draft_finite, step.floor, drafts)
