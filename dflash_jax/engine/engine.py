"""The engine: generate, stream or submit requests on a target and its drafter.

Any thread may submit, cancel and iterate over streams. One thread at a time runs steps; others wait
for it. A server calls `advance` in a thread of its own while the engine is `busy`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, overload

from dflash_jax.engine import break_even, vocabulary
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.handle import AsyncDriver, AsyncStream, RequestHandle, Stream
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.prefix.cache import PrefixCache
from dflash_jax.engine.request import CancelCell, Prompt, Request, make_requests
from dflash_jax.engine.result import Result
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingOptions, SamplingParams
from dflash_jax.engine.scheduler import variants_of
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.engine.structured.call_grammars import CallGrammars
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.graph.build import WORKERS, CompiledPrograms, Executable
from dflash_jax.graph.executor import Executor, LocalExecutor
from dflash_jax.graph.explain import Explanation
from dflash_jax.graph.graph import Graph
from dflash_jax.graph.keys import WARM_UP_KINDS, ProgramKey, Variant
from dflash_jax.graph.steps.pair import Params
from dflash_jax.show import precision
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import chat_tools
from dflash_jax.utils import forking
from dflash_jax.utils.progress import announced

Messages = str | Sequence[dict[str, Any]]


class Engine:
    """A target, its drafter and a plan, ready to generate. Made by `dflash_jax.load`."""

    def __init__(
        self,
        graph: Graph,
        params: Params,
        *,
        tokenizer: Tokenizer | None = None,
        progress: bool = False,
        executor: Executor | None = None,
    ):
        """Put parameters on their device; compile nothing.

        Args:
          graph: modules and plan.
          params: of both models, by role; NumPy or JAX arrays. An `executor` has its own instead.
          tokenizer: without one, prompts are token ids.
          progress: announce on standard error what takes longer than two seconds.

        Raises:
          ForkedProcessError: JAX runs in the parent of this process. Other methods raise it, too.
        """
        forking.check_not_forked()
        self.graph, self.plan, self.target = graph, graph.plan, graph.config
        self.tokenizer, self.progress = tokenizer, progress
        runs = executor or LocalExecutor(graph, params)
        self.runner = runner = ModelRunner(graph, runs)
        self.core = EngineCore(self.runner, self.plan)
        self.events = self.core.events
        self._driver = AsyncDriver()
        self.grammars = Grammars(tokenizer, self.target.vocab_size, graph.stop_tokens)
        self.call_grammars = CallGrammars(
            self.grammars, lambda missing: runner.compiled.compile(missing, workers=1), tokenizer
        )

    def __repr__(self) -> str:
        plan, drafts = self.plan, self.drafter is not None
        kind = f"{self.graph.drafter_name} drafter" if drafts else "no drafter"
        block = f", block {plan.block}" if drafts else ""
        target = f"{self.graph.target_name} target of {self.target.num_layers} layers"
        rows = f"{plan.rows} row{'s' * (plan.rows > 1)} of {plan.max_length} tokens"
        return f"<Engine: {target}, {kind}{block}, {rows}, {precision(plan)}>"

    @property
    def drafter(self) -> Any:
        """Config of the drafter, or the drafter itself if it has none; None without a drafter."""
        drafter = self.graph.pair.drafter
        return getattr(drafter, "config", drafter)

    def explain(self, *, compile: bool = False) -> Explanation:
        """Return the report of `dflash-jax explain` about the engine; it prints as a table."""
        return self.graph.explain(compile=compile)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result:
        """Generate an answer; arguments and errors as for `stream`."""
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

        Arguments and errors as for `stream`. There are n answers for each prompt, next to each
        other in the list; answer i draws with seed + i. Answers that start together share the
        prefill of the prompt, except for its last chunk.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; expected a list of texts or of ids")
        params = SamplingParams.of(params, options)
        sequences: list[RunningRequest] = []
        try:
            for request in [r for p in prompts for r in self._requests(p, params, n)]:
                sequences.append(sequence := self._sequence(request, cancel))
                sequence.delay(self.compile(variants_of(sequence)))
                while not self.core.try_add([sequence]):
                    self.advance()
            while not all(sequence.done for sequence in sequences):
                self.advance()
        finally:
            for sequence in sequences:
                self.core.cancel(sequence)
        return [sequence.result() for sequence in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Generate piece by piece.

        Args:
          prompt: a text, or token ids. A text is encoded as it is; see `chat_ids` for templates.
          params: options of the request.
          cancel: a cell by which any thread may end the request. Unlike `Stream.close`, it also
            keeps the prompt out of the prefix cache.
          options: fields of `dj.SamplingParams`; they take precedence over `params`.

        Raises:
          RequestError: the arguments cannot be served; the message says why.
          QueueFullError: as many requests wait as the plan allows.
          ComputeError: while iterating, if logits stop being finite or the device fails twice.
        """
        handle = self.submit(prompt, params, cancel=cancel, **options)
        return Stream(handle, self.advance, self.cancel)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Generate piece by piece, for `async for`; as `stream`, with errors while iterating."""
        submit = functools.partial(self.submit, prompt, params, cancel=cancel, **options)
        return AsyncStream(submit, self.advance, self._driver)

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream: ...

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result | Stream:
        """Answer a conversation, which is put into the model's chat template.

        Args:
          messages: dicts with `role` and `content`, as in OpenAI's API, or a text for the content
            of a single user message.
          stream: return a stream of pieces instead of the result.
          chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
          params, cancel, options: as for `stream`. The template gets the `tools`, too; the text of
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
        prompt = self.chat_ids(messages, **variables, **(chat_template_kwargs or {}))
        if stream:
            return self.stream(prompt, params, cancel=cancel)
        return self.generate(prompt, params, cancel=cancel)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        """Raise RequestError if `stream` would; compile nothing and queue nothing."""
        self._requests(prompt, SamplingParams.of(params, options), 1)

    def chat_ids(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Return the prompt ids of a conversation, by the model's chat template.

        Warns if `tools` are given and the template has no place for them.

        Raises:
          RequestError: there is no tokenizer, or the template refuses the messages.
        """
        return vocabulary.chat_ids(self.tokenizer, messages, variables)

    def warm_up(self, *, measure: bool = False, **kinds: bool) -> float:
        """Compile the greedy programs, and others if asked; return the seconds it took.

        Args:
          measure: time drafted against plain steps, so that requests of an exact plan stop drafting
            while it does not pay off; changes no token.
          kinds: other requests to expect: `sampled`, `penalized` (also biases and
            log-probabilities), `constrained` (structured output), `recovery`.

        Raises:
          TypeError: a kind has another name.
        """
        if unknown := kinds.keys() - WARM_UP_KINDS:
            known = ", ".join(WARM_UP_KINDS)
            raise TypeError(f"{min(unknown)!r} is no kind of request; known are {known}")
        wanted = [variant for kind, variant in WARM_UP_KINDS.items() if kinds.get(kind)]
        seconds = self.compile([Variant.GREEDY, *wanted])
        if measure and self.drafter is not None and self.plan.exact:
            self.break_even = self.core.while_idle(lambda: break_even.measure(self.runner))
        return seconds

    def compile(self, variants: Iterable[Variant]) -> float:
        """Compile missing programs of variants, one at a time while busy; return the seconds."""
        if not self.compiled.missing(variants := list(variants)):
            return 0.0
        with announced("dflash_jax: compiling", shown=self.progress):  # or loading programs
            return self.compiled.compile(variants, workers=1 if self.busy else WORKERS)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RequestHandle:
        """Queue a request; its `result` waits for it. Arguments and errors as for `stream`."""
        params = SamplingParams.of(params, options)
        return self.enqueue(self.prepare(prompt, params, cancel=cancel))[0]

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[RequestHandle]:
        """Check n requests for one prompt and compile their grammars; queue nothing.

        Arguments and errors as for `stream`. Answer i draws with seed + i. `enqueue` compiles
        missing programs of `RequestHandle.variants`, unless another thread did before.
        """
        requests = self._requests(prompt, SamplingParams.of(params, options), n)
        return [RequestHandle(self._sequence(request, cancel)) for request in requests]

    def enqueue(self, handles: list[RequestHandle]) -> list[RequestHandle]:
        """Queue prepared requests, all of them or none.

        Raises:
          QueueFullError: the queue has no room for all of them.
        """
        for handle in handles:
            handle.delay(self.compile(handle.variants))
        self.core.add([handle.sequence for handle in handles])
        for handle in handles:
            handle.advance = self.advance
        return handles

    def advance(self) -> None:
        """Run one turn: dispatch a step if any row can use one, then process what is due."""
        self.core.step()

    def cancel(self, handle: RequestHandle) -> None:
        """End a request, queued or running; does nothing if it already ended."""
        self.core.cancel(handle.sequence)

    def close(self) -> None:
        """End all processes and wait until prefixes are on disk; without hosts, it stays usable."""
        self.core.tidy()
        self.grammars.close()
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def measures_drafting(self) -> bool:
        """Whether requests measure what drafting gains, and stop it where it loses.

        They do so in engines of `dj.load`, once, where few drafts are accepted: it takes the time
        of a few steps, and changes the same as `warm_up(measure=True)`. Nothing is measured where
        several processes run one program.
        """
        return self.core.meter.enabled

    @measures_drafting.setter
    def measures_drafting(self, measures: bool) -> None:
        self.core.meter.enabled = measures

    @property
    def break_even(self) -> BreakEven:
        """Tokens that a drafted round must commit to pay off, as far as it was measured."""
        return self.core.meter.value

    @break_even.setter
    def break_even(self, known: BreakEven) -> None:
        meter = self.core.meter
        meter.value, meter.enabled = known, meter.enabled and not known.positions

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        return self.core.busy

    @property
    def queued(self) -> int:
        """Number of requests that wait for a row."""
        return len(self.core.scheduler.waiting)

    @property
    def active(self) -> int:
        """Number of requests that have a row."""
        return len(self.core.scheduler.running)

    @property
    def params(self) -> Params:
        """The parameters of both models; others of the same shapes may be assigned.

        Raises:
          CheckpointError: they have another structure, shape or type.
          RequestError: requests are running.
        """
        return self.runner.executor.params

    @params.setter
    def params(self, params: Params) -> None:
        self.core.while_idle(functools.partial(self.runner.exchange, params))

    @property
    def compiled(self) -> CompiledPrograms:
        """The programs of the plan and their executables, for compiling in other threads."""
        return self.runner.compiled

    @property
    def executables(self) -> dict[ProgramKey, Executable]:
        """Programs compiled so far."""
        return self.compiled.executables

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return self.compiled.seconds

    def share_programs(self, other: "Engine") -> None:
        """Share the compiled programs and measurements of an engine with the same models.

        Raises:
          PlanError: the engines' models or `Plan.shape` differ.
        """
        if self.graph != other.graph:
            expected = f"expected the same models and the same plan.shape, {self.plan.shape}"
            raise PlanError(f"the other engine's programs are of another shape; {expected}")
        self.runner.compiled, self.break_even = other.compiled, other.break_even

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Cached prefixes and their counters; None if the plan keeps none."""
        return None if self.runner.prefixes is None else self.runner.prefixes.cache

    def _requests(self, prompt: Prompt, params: SamplingParams, n: int) -> list[Request]:
        if forking.parent:
            forking.check_not_forked()
        parts = self.plan, self.target, self.tokenizer
        return make_requests(prompt, params, n, *parts, drafts=self.drafter is not None)

    def _sequence(self, request: Request, cancel: CancelCell | None) -> RunningRequest:
        structure = request.params.structured
        retry = request.recovery.call_retry and self.grammars.available
        return RunningRequest(
            request,
            self.tokenizer,
            None if structure is None else self.grammars.make(structure),
            cancel=cancel,
            call_grammars=self.call_grammars if retry else None,
            break_even=self.break_even if self.plan.exact else None,
            acceptance=self.core.acceptance,
        )
