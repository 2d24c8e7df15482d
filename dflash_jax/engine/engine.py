"""The engine: generate answers or submit requests on a target and its drafter.

Any thread may submit, cancel and iterate over requests. One thread at a time runs steps; others
wait for it, and their requests, cancellations and deadlines take effect where the next step begins.
A server calls `advance` in a thread of its own while `core.busy`.
"""

import asyncio
import math
import time
from collections.abc import (
    AsyncIterator,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Literal, Self, Unpack, overload

from dflash_jax.engine import break_even, vocabulary
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import CancelCell, Prompt, Request, make_requests
from dflash_jax.engine.result import Piece, Result, Stats
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingOptions, SamplingParams
from dflash_jax.engine.scheduler import variants_of
from dflash_jax.engine.structured.grammars import CallGrammars, Grammars
from dflash_jax.engine.turns.turn_driver import TurnDriver
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.graph.build import WORKERS
from dflash_jax.graph.executor import Executor
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import Variant
from dflash_jax.graph.steps.pair import Params
from dflash_jax.show import precision
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import chat_tools
from dflash_jax.utils import forking
from dflash_jax.utils.progress import announced

SLOW_TOKENS = 2048  # of long prompts that are fed by single chunks before wide calls are compiled

Messages = str | Sequence[dict[str, Any]]


class RequestHandle:
    """A request from `Engine.submit`: iterate over its pieces, await it, or call `result`.

    `for` runs turns of the engine; `async for` and `await` have a thread run them, and never block
    the event loop. Every iteration begins with the first piece. One that is left before its end
    cancels the request, and so does garbage collection of the handle: at the engine's next turn,
    as collection may happen in any thread at any time and must take no lock.

    Attributes:
      sequence: the engine's own.
    """

    def __init__(self, sequence: RunningRequest, driver: TurnDriver):
        self.sequence = sequence
        self._driver = driver

    @property
    def number(self) -> int:
        """The number by which log lines name the request; unique in the process."""
        return self.sequence.number

    @property
    def variants(self) -> list[Variant]:
        """Variants of programs that the request may need."""
        return variants_of(self.sequence)

    @property
    def done(self) -> bool:
        """Whether the request ended; its pieces are complete then."""
        return self.sequence.done

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended: "stop", "length", "cancelled" or "error"; None while it runs."""
        return self.sequence.finish.value if self.sequence.finish else None

    @property
    def pieces(self) -> list[Piece]:
        """Output so far, in the portions in which it was generated. The list only grows."""
        return self.sequence.output.pieces

    @property
    def token_ids(self) -> list[int]:
        """Output tokens so far."""
        return self.sequence.output.ids

    @property
    def num_computed(self) -> int:
        """Prompt tokens computed, or restored from the prefix cache, so far."""
        return self.sequence.cursor.num_computed

    @property
    def num_cached(self) -> int:
        """Prompt tokens restored from the prefix cache so far."""
        return self.sequence.cursor.num_cached

    @property
    def stats(self) -> Stats:
        """Statistics so far."""
        return self.sequence.stats

    def delay(self, seconds: float) -> None:
        """Count seconds before the request was queued as `Stats.compile_s`; moves its deadline."""
        self.sequence.delay(seconds)

    def result(self, timeout: float | None = None) -> Result:
        """Return the result; run turns of the engine until the request ends.

        Args:
          timeout: seconds after which no further turn is run.

        Raises:
          TimeoutError: the request still runs.
          RequestError: the request was prepared but not queued, or its grammar gave up.
          ComputeError: the device or the target's numbers broke.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        if not self.done and not self._driver.core.inbox.empty:
            self._driver.core.settle()
        while not self.done:
            if time.monotonic() >= end:
                raise TimeoutError(f"the request still runs after {timeout} s; ask again, or close")
            self._advance()
        return self.sequence.result()

    def close(self) -> None:
        """End the request if it still runs; `result` then has its output so far."""
        self._driver.core.close([self.sequence])

    def _drop(self) -> None:
        """Have the next turn end the request; takes no lock."""
        if self.sequence.queued and not self.sequence.done:
            self._driver.core.inbox.end(self.sequence.number, "dropped")

    def __del__(self) -> None:
        self._drop()

    def __iter__(self) -> Iterator[Piece]:
        num_read = 0
        try:
            while True:
                done = self.done  # before looking: another thread may run turns
                while num_read < len(self.pieces):
                    num_read += 1
                    yield self.pieces[num_read - 1]
                if done:
                    self.result()
                    return
                self._advance()
        except GeneratorExit:
            self._drop()
            raise
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        num_read = 0
        failures: list[BaseException] = []

        def notify(failure: BaseException | None) -> None:
            failures.extend([failure] if failure else ())
            if failure or self.done or len(self.pieces) > num_read:
                loop.call_soon_threadsafe(news.set)

        try:
            self._check_queued()
            self._driver.attach(self.sequence, notify)
            while True:
                news.clear()
                done = self.done  # before looking: a thread runs turns
                while num_read < len(self.pieces):
                    num_read += 1
                    yield self.pieces[num_read - 1]
                if done:
                    self.result()
                    return
                if failures:
                    raise failures[0]
                await news.wait()
        finally:
            self._drop()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        async for _ in self:
            pass
        return self.result()

    def _check_queued(self) -> None:
        if not self.sequence.queued:
            raise RequestError("the request is not queued; give it to `Engine.enqueue` first")

    def _advance(self) -> None:
        self._check_queued()
        self._driver.core.step()


class Engine:
    """A target, its drafter and a plan, ready to generate. Made by `dflash_jax.load`."""

    def __init__(
        self,
        graph: Graph,
        params: Params,
        *,
        tokenizer: Tokenizer | None = None,
        progress: bool = False,
    ):
        """Put parameters on their device; compile nothing.

        Args:
          graph: modules and plan.
          params: of both models, by role; NumPy or JAX arrays.
          tokenizer: without one, prompts are token ids.
          progress: announce on standard error what takes longer than two seconds.

        Raises:
          ForkedProcessError: JAX runs in the parent of this process. Other methods raise it, too.
        """
        forking.check_not_forked()
        self.graph = graph
        self.plan = graph.plan
        self._target = graph.config
        self.tokenizer = tokenizer
        self._progress = progress
        runner = ModelRunner(graph, Executor(graph, params))
        grammars = Grammars(tokenizer, self._target.vocab_size, graph.stop_tokens)
        call_grammars = CallGrammars(
            grammars, lambda missing: runner.compiled.compile(missing, workers=1), tokenizer
        )
        self.core = EngineCore(runner, call_grammars)
        self._driver = TurnDriver(self.core)

    def __repr__(self) -> str:
        plan = self.plan
        drafts = self.graph.pair.drafter is not None
        kind = f"{self.graph.drafter_name} drafter" if drafts else "no drafter"
        block = f", block {plan.block}" if drafts else ""
        target = f"{self.graph.target_name} target of {self.graph.config.num_layers} layers"
        rows = f"{plan.rows} row{'s' * (plan.rows > 1)} of {plan.max_length} tokens"
        return f"<Engine: {target}, {kind}{block}, {rows}, {precision(plan)}>"

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result:
        """Generate an answer; arguments and errors as for `submit`."""
        params = SamplingParams.of(params, options)
        return self.generate_many([prompt], params, cancel=cancel)[0]

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Result]:
        """Generate answers to several prompts, as many at a time as the plan has rows.

        Arguments and errors as for `submit`. There are n answers for each prompt, next to each
        other in the list; answer i draws with seed + i. Answers that start together share the
        prefill of the prompt, except for its last chunk.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; expected a list of texts or of ids")
        params = SamplingParams.of(params, options)
        sequences: list[RunningRequest] = []
        try:
            for requests in [self._requests(prompt, params, n) for prompt in prompts]:
                group: int | None = None
                for request in requests:
                    sequence = self._sequence(request, cancel=cancel, group=group)
                    group = sequence.group
                    sequences.append(sequence)
                    sequence.delay(self.warm_up(*variants_of(sequence), *self._optional_variants()))
                    while not self.core.try_add([sequence]):
                        self.advance()
            while not all(sequence.done for sequence in sequences):
                self.advance()
        finally:
            self.core.close(sequences)
        return [sequence.result() for sequence in sequences]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RequestHandle:
        """Queue a request; its handle yields pieces, and waits for the result.

        This compiles missing programs and grammars; in an event loop, call it by
        `asyncio.to_thread` if it may.

        Args:
          prompt: a text, or token ids. A text is encoded as it is; see `chat_ids` for templates.
          params: options of the request.
          cancel: a cell by which any thread may end the request. Unlike `RequestHandle.close`, it
            also keeps the prompt out of the prefix cache.
          options: fields of `dj.SamplingParams`; they take precedence over `params`.

        Raises:
          RequestError: the arguments cannot be served; the message says why.
          QueueFullError: as many requests wait as the plan allows.
          ComputeError: while waiting, if logits stop being finite or the device fails twice.
        """
        params = SamplingParams.of(params, options)
        return self.enqueue(self.prepare(prompt, params, cancel=cancel))[0]

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RequestHandle: ...

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result | RequestHandle:
        """Answer a conversation, which is put into the model's chat template.

        Args:
          messages: dicts with `role` and `content`, as in OpenAI's API, or a text for the content
            of a single user message.
          stream: return the handle of `submit` instead of the result.
          chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
          parse_special: take what messages and tools spell like special tokens, such as
            "<|im_start|>", for these tokens. By default it is text, as its author may be anybody.
          params, cancel, options: as for `submit`. The template gets the `tools`, too; the text of
            the answer has their calls in the model's own syntax.

        Raises:
          RequestError: there is no tokenizer or template, the template refuses the messages, or
            the request cannot be served.
        """
        params = SamplingParams.of(params, options)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if isinstance(messages, bytes) or not isinstance(messages, Iterable):
            raise RequestError(f"messages is {messages!r}; expected a list of messages, or a text")
        variables = {"tools": chat_tools(params.tools)} if params.tools else {}
        variables |= chat_template_kwargs or {}
        prompt = self.chat_ids(messages, parse_special=parse_special, **variables)
        return (self.submit if stream else self.generate)(prompt, params, cancel=cancel)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        """Raise RequestError if `submit` would; compile nothing and queue nothing."""
        self._requests(prompt, SamplingParams.of(params, options), 1)

    def chat_ids(
        self, messages: Sequence[dict[str, Any]], *, parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """Return the prompt ids of a conversation, by the model's chat template.

        Warns if `tools` are given and the template has no place for them. See `chat` for
        `parse_special`.

        Raises:
          RequestError: there is no tokenizer, or the template refuses the messages.
        """
        return vocabulary.chat_ids(self.tokenizer, messages, variables, parse_special)

    def warm_up(self, *variants: Variant | str) -> float:
        """Compile missing programs, one at a time while busy; return the seconds it took.

        Args:
          variants: kinds of requests to expect: "greedy" (the default), "sampled", "penalized"
            (also biases and log-probabilities), "constrained" (structured output), "recovery",
            "prompt" (log-probabilities of the prompt), "chunks" (long prompts are fed in calls of
            several chunks).

        Raises:
          RequestError: a variant has another name.
        """
        if unknown := {*variants} - {*Variant}:
            known = ", ".join(Variant)
            raise RequestError(f"{min(unknown)!r} is no variant; expected some of {known}")
        wanted = [Variant(variant) for variant in variants] or [Variant.GREEDY]
        compiled = self.core.runner.compiled
        if not compiled.missing(wanted):
            return 0.0
        with announced("dflash_jax: compiling", shown=self._progress):  # or loading programs
            return compiled.compile(wanted, workers=1 if self.core.busy else WORKERS)

    def time_drafting(self) -> None:
        """Time drafted against plain steps, of an exact plan.

        Requests then stop drafting while it does not pay off, and make as many drafts as pay off
        most. This changes no token.

        Raises:
          RequestError: requests are running.
        """
        self.warm_up()
        if self.graph.pair.drafter is not None and self.plan.exact:
            known = self.core.while_idle(lambda: break_even.measure(self.core.runner))
            self.core.meter.value = known

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        cancel: CancelCell | None = None,
        label: str = "",
        **options: Unpack[SamplingOptions],
    ) -> list[RequestHandle]:
        """Check n requests for one prompt and compile their grammars; queue nothing.

        Arguments and errors as for `submit`. Answer i draws with seed + i. `enqueue` compiles
        missing programs of `RequestHandle.variants`, unless another thread did before. Log lines
        name the requests by `label`.
        """
        handles: list[RequestHandle] = []
        for request in self._requests(prompt, SamplingParams.of(params, options), n):
            group = handles[0].number if handles else None
            sequence = self._sequence(request, cancel=cancel, label=label, group=group)
            handles.append(RequestHandle(sequence, self._driver))
        return handles

    def enqueue(self, handles: list[RequestHandle]) -> list[RequestHandle]:
        """Queue prepared requests, all of them or none.

        Raises:
          QueueFullError: the queue has no room for all of them.
        """
        for handle in handles:
            handle.delay(self.warm_up(*handle.variants, *self._optional_variants()))
        self.core.add([handle.sequence for handle in handles])
        return handles

    def advance(self) -> None:
        """Run one turn: dispatch a step if any row can use one, then process what is due."""
        self.core.step()

    def close(self) -> None:
        """End processes that try grammars, and wait until prefixes are on disk; it stays usable."""
        self.core.settle()
        self.core.stop_recording("the engine was closed")
        self.core.grammars.close()
        self.core.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def measures_drafting(self) -> bool:
        """Whether requests measure what drafting gains, and stop it where it loses.

        They do so in engines of `dj.load`, once, where few drafts are accepted: it takes the time
        of a few steps, and changes the same as `time_drafting`. Nothing is measured where
        several processes run one program.
        """
        return self.core.meter.enabled

    @measures_drafting.setter
    def measures_drafting(self, measures: bool) -> None:
        self.core.meter.enabled = measures

    @property
    def params(self) -> Params:
        """The parameters of both models, as programs take them; `update_params` changes them."""
        return self.core.runner.executor.params

    def update_params(self, params: Mapping[str, Any]) -> None:
        """Replace the weights of the target, of the drafter, or of both; compile nothing.

        Later answers equal those of a new engine with these weights. All cached prefixes are
        dropped; those on disk stay under the name of their own weights. Requests have to end
        first, so that no answer comes from two models.

        Arrays that need no cast or other layout are used without a copy: do not write to them, and
        donate them to another program only if an update follows before the next request.

        Args:
          params: trees like `engine.params` by role, "target" and "drafter"; a role that is left
            out keeps its weights. Floats of any precision are cast to the plan's dtype, and packed
            and laid out as `dj.load` does. Leaves may be NumPy arrays, JAX arrays or variables of
            Flax NNX; a module of NNX stands for its own weights.

        Raises:
          CheckpointError: weights are missing or unknown, or have another shape or type; those of
            a file's format can only be loaded. The engine keeps its own.
          RequestError: requests are running, or the model is on several hosts.
        """
        self.core.update_params(params)

    def share_programs(self, other: "Engine") -> None:
        """Share the compiled programs and measurements of an engine with the same models.

        Raises:
          PlanError: the engines' models or `Plan.shape` differ.
        """
        if self.graph != other.graph:
            expected = f"expected the same models and the same plan.shape, {self.plan.shape}"
            raise PlanError(f"the other engine's programs are of another shape; {expected}")
        self.core.runner.compiled = other.core.runner.compiled
        self.core.meter.use(other.core.meter.value)

    def _optional_variants(self) -> list[Variant]:
        """Return the variant that feeds long prompts faster, once it would have been worth it."""
        runner = self.core.runner
        enough = self.core.runner.slow_tokens >= SLOW_TOKENS
        missing = enough and not runner.compiled.wanted(Variant.CHUNKS)
        return [Variant.CHUNKS] if missing and not self.core.busy else []

    def _requests(self, prompt: Prompt, params: SamplingParams, n: int) -> list[Request]:
        if forking.parent:
            forking.check_not_forked()
        parts = (self.plan, self._target, self.tokenizer)
        drafts = self.graph.pair.drafter
        return make_requests(prompt, params, n, *parts, drafts=drafts is not None)

    def _sequence(
        self,
        request: Request,
        *,
        cancel: CancelCell | None = None,
        label: str = "",
        number: int | None = None,
        group: int | None = None,
    ) -> RunningRequest:
        structure = request.params.structured
        return RunningRequest(
            request,
            self.tokenizer,
            None if structure is None else self.core.grammars.make(structure),
            cancel=cancel,
            label=label,
            number=number,
            group=group,
            retries_calls=request.recovery.call_retry and self.core.grammars.available,
            stops_drafting=self.plan.exact,
        )
