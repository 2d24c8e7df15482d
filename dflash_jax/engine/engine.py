"""Drives the compiled programs: admits requests to rows, runs steps, hands out tokens.

The host stays one step ahead: it dispatches the next step before it reads the last one's
answer. That is safe because the device cuts every row by itself; a row that has ended is
frozen until it is given a new request.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler.build import Executable, compile_programs
from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import Params, declare, empty_state
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine import controller
from dflash_jax.engine.request import Live, Request, as_texts, pick_seed, token_ids
from dflash_jax.engine.result import Piece, Result
from dflash_jax.errors import RequestError
from dflash_jax.state import RowRules, StepOutput, read_output
from dflash_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step whose answer was not read yet."""

    output: StepOutput
    readers: dict[int, Live]  # by row: who was in it, and hears the answer
    drafts: int  # drafted tokens per row; 0 in prefill and plain steps
    decode: bool


class Stream:
    """A running request: iterate for pieces, then read `result`. Closing it cancels it."""

    def __init__(self, engine: "Engine", live: Live):
        self._engine, self._live = engine, live

    def __iter__(self) -> Iterator[Piece]:
        given = 0
        try:
            while True:
                while given < len(self._live.pieces):
                    given += 1
                    yield self._live.pieces[given - 1]
                if self._live.done:
                    self._live.result()
                    return
                self._engine.advance()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the request if it still runs; what it produced so far stays in `result`."""
        self._engine.cancel(self._live)

    @property
    def result(self) -> Result:
        """The result so far; final once iteration ended."""
        if not self._live.done:
            raise RequestError("the stream still runs; iterate it to its end, or close it first")
        return self._live.result()


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
        self.programs = declare(plan, target, drafter)
        self.executables: dict[str, Executable] = {}
        self.compile_s = 0.0  # seconds spent compiling so far
        self._state = jax.device_put(
            jax.tree.map(
                lambda x: np.zeros(x.shape, x.dtype),
                jax.eval_shape(lambda: empty_state(plan, target, drafter)),
            )
        )
        self._waiting: collections.deque[Live] = collections.deque()
        self._rows: list[Live | None] = [None] * plan.rows
        self._flights: collections.deque[_Flight] = collections.deque()
        self._rules: RowRules | None = None
        self._prefilled_last = False

    # -- what a caller uses -------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Generates to the end; arguments as for `stream`."""
        return self.generate_many([prompt], **options)[0]

    def generate_many(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """Generates for several prompts, as many side by side as the plan has rows."""
        lives: list[Live] = []
        try:
            for prompt in prompts:
                lives.append(self.submit(prompt, **options))
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
          temperature, top_p, top_k, seed: sampling; temperature 0 is greedy. Without a seed
            every call draws a new one.
          stop: text or texts that end the output; they are not part of it.
          stop_token_ids: ids that end the output, besides the model's own end tokens.
          ignore_eos: let the model's end tokens pass.
          speculative: False decodes without drafting; the tokens are the same.

        Raises:
          RequestError: the arguments cannot be served; says why.
          ComputeError: while iterating, if the target's logits stop being finite.
        """
        return Stream(self, self.submit(prompt, **options))

    def chat_ids(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Prompt ids of a conversation, by the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("this model ships no tokenizer; give token ids instead of messages")
        return self.tokenizer.chat(messages, **variables)

    def warm_up(self, *, sampled: bool = False) -> float:
        """Compiles the greedy programs, and the sampling ones if asked; returns the seconds."""
        return self._compile(False) + (self._compile(True) if sampled else 0.0)

    # -- the loop -----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        speculative: bool = True,
    ) -> Live:
        """Queues a request; `advance` runs it. Arguments as for `stream`."""
        eos = () if ignore_eos else self.target.eos_token_ids
        request = Request(
            prompt=token_ids(prompt, self.tokenizer, self.target.vocab_size),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=pick_seed(seed),
            stop=as_texts(stop),
            stop_ids=frozenset((*eos, *stop_token_ids)),
            speculative=speculative and self.drafter is not None,
        )
        self._check_fits(request)
        live = Live(request, self.tokenizer)
        live.stats.compile_s = self._compile(temperature > 0)
        self._waiting.append(live)
        return live

    def cancel(self, live: Live) -> None:
        """Ends a request wherever it stands; does nothing if it already ended."""
        if live.done:
            return
        live.take(controller.Cancelled())
        if live in self._waiting:
            self._waiting.remove(live)
        self._release(live)

    def advance(self) -> None:
        """One turn: dispatch a step if any row can use one, then read what is due."""
        with jax.no_tracing():
            self._admit()
            dispatched = self._dispatch_prefill() or self._dispatch_decode()
            ahead = self.plan.lookahead if dispatched else 0
            while len(self._flights) > ahead:
                self._read(self._flights.popleft())

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
        for row, live in feeding.items():
            part = live.request.prompt[live.fed : live.fed + chunk]
            tokens[row, : len(part)], count[row], fresh[row] = part, len(part), live.fed == 0
            live.fed += len(part)
            if live.fed == len(live.request.prompt):
                finished[row] = live
                self._rules = None
        self._run("prefill", tokens, count, fresh, readers=finished)
        return True

    def _dispatch_decode(self) -> bool:
        decoding = self._decoding()
        if not decoding or self._may_all_end():
            return False
        speculative = any(live.speculates for live in decoding.values())
        name = "speculative" if speculative else "plain" if self.plan.exact else "plain1"
        drafts = self.plan.block - 1 if speculative else 0
        self._run(name, readers=decoding, drafts=drafts, decode=True)
        return True

    def _decoding(self) -> dict[int, Live]:
        return {
            row: live
            for row, live in enumerate(self._rows)
            if live and live.fed == len(live.request.prompt)
        }

    def _may_all_end(self) -> bool:
        """Whether unread steps may already bring every row to its length limit."""
        unread = [live for flight in self._flights for live in flight.readers.values()]
        steps = collections.Counter(map(id, unread))
        return bool(self._flights) and all(
            live.state.emitted + steps[id(live)] * self.plan.block >= live.request.max_tokens
            for live in self._decoding().values()
        )

    def _run(
        self,
        name: str,
        *arguments: Any,
        readers: dict[int, Live],
        drafts: int = 0,
        decode: bool = False,
    ) -> None:
        """Dispatches a program; its answer is read later."""
        sampled = any(live and live.request.temperature > 0 for live in self._rows)
        program = self.executables[name + "_sampled" if sampled else name]
        self._rules = self._rules or self._make_rules()
        self._state, output = program(self.params, self._state, *arguments, self._rules)
        output.packed.copy_to_host_async()
        self._flights.append(_Flight(output, dict(readers), drafts, decode))

    def _read(self, flight: _Flight) -> None:
        steps = read_output(flight.output) if flight.readers else []
        broken = []
        for row, live in flight.readers.items():
            if live.done:
                continue
            step = steps[row]
            if flight.drafts and live.request.speculative:
                live.stats.count_round(len(step.tokens), flight.drafts)
            elif flight.decode:
                live.stats.plain_steps += bool(step.tokens)
            live.take(controller.Stepped(step.tokens, step.finite, step.draft_finite))
            if live.done:
                self._release(live)
            if not step.finite:
                broken.append(row)
        if broken:
            self._wipe(broken)

    def _release(self, live: Live) -> None:
        self._rows = [None if x is live else x for x in self._rows]
        self._rules = None

    def _wipe(self, rows: list[int]) -> None:
        """Clears rows whose caches may hold non-finite numbers, before anyone else gets them."""
        mask = np.isin(np.arange(self.plan.rows), rows)
        self._state = self.executables["wipe"](self._state, mask)

    def _make_rules(self) -> RowRules:
        """Per-row rules for the device; rows without a finished prompt are frozen by limit 0."""
        rows, ready = self.plan.rows, self._decoding()
        stop = np.full((rows, self.plan.stop_slots), -1, np.int32)
        limit, top_k = np.zeros((2, rows), np.int32)
        temperature, top_p = np.zeros((rows,), np.float32), np.ones((rows,), np.float32)
        seed = np.zeros((rows,), np.uint32)
        for row, live in enumerate(self._rows):
            if live is None:
                continue
            request = live.request
            stop[row, : len(request.stop_ids)] = sorted(request.stop_ids)
            limit[row] = request.limit if row in ready else 0
            temperature[row], top_p[row] = request.temperature, request.top_p
            top_k[row], seed[row] = request.top_k, request.seed
        columns = {
            "stop_ids": stop,
            "limit": limit,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
        }
        return RowRules(**jax.device_put(columns))

    def _check_fits(self, request: Request) -> None:
        if request.limit > self.plan.max_length:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is"
                f" {request.max_tokens}: together {request.limit}, but the plan holds"
                f" {self.plan.max_length}. Lower max_tokens, shorten the prompt, or load with a"
                f" larger max_length (the target allows {self.target.max_length})"
            )
        if len(request.stop_ids) > self.plan.stop_slots:
            raise RequestError(
                f"{len(request.stop_ids)} stop tokens were given, but the plan has room for"
                f" {self.plan.stop_slots}; load with a larger stop_slots"
            )

    def _compile(self, sampled: bool) -> float:
        """Compiles what a lane still lacks; returns the seconds it took."""
        started = time.perf_counter()
        lane = {name for name in self.programs if name.endswith("_sampled") == sampled} | {"wipe"}
        lane -= {"forced"} | set(self.executables)
        if not lane:
            return 0.0
        self.executables |= compile_programs(self.programs[name] for name in sorted(lane))
        seconds = time.perf_counter() - started
        self.compile_s += seconds
        return seconds
