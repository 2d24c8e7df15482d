"""The engine: what callers use to generate, stream and submit.

Any thread may submit, cancel and iterate streams. Steps are made by one thread at a time:
whoever calls `advance` while another does waits for its turn. A server gives that work to a
thread of its own, which calls `advance` while the engine is `busy`.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from dflash_jax.compiler.build import Executable
from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import Params, Program
from dflash_jax.compiler.resolve import resolve_here
from dflash_jax.compiler.variants import WORKERS, CompiledPrograms, Variant
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.arguments import CancellableOptions, Options, check_names, requests_of
from dflash_jax.engine.lanes import variants_of
from dflash_jax.engine.loop import Loop
from dflash_jax.engine.model_runner import Runner
from dflash_jax.engine.prefix.cache import PrefixCache
from dflash_jax.engine.recovery import CancelCell
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import Result
from dflash_jax.engine.sequence import Live
from dflash_jax.engine.stream import Stream
from dflash_jax.engine.structured.call_grammars import CallGrammars
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import PlanError, QueueFullError, RequestError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.forking import check_not_forked
from dflash_jax.utils.progress import announced

Prompt = str | Sequence[int]
COMPILING = "dflash_jax: compiling"  # or reading what was compiled before


class Engine:
    """A target, its drafter and a plan, ready to generate. Made by `dflash_jax.load`."""

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        params: Params,
        plan: Plan | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        progress: bool = False,
    ):
        """Put parameters on their device; compiles nothing.

        Args:
          params: of both models, by role; NumPy or JAX arrays.
          plan: what is decided; open choices are made here, for the default device.
          tokenizer: without one, prompts are token ids.
          progress: announce on standard error what takes longer than two seconds.

        Raises:
          PlanError: the plan does not fit the models or the memory.
          ForkedProcessError: JAX runs in the parent of this process. Other methods raise it, too.
        """
        check_not_forked()
        plan = plan if plan and plan.resolved else resolve_here(plan or Plan(), target, drafter)
        self.target, self.drafter, self.plan = target, drafter, plan
        self.tokenizer, self.progress = tokenizer, progress
        self.runner = Runner(target, drafter, params, plan)
        self.loop = Loop(self.runner, plan)
        self.events = self.loop.events
        self.break_even = 0.0  # tokens a drafted round must decide to pay; 0 until measured
        self.grammars = Grammars(tokenizer, target.vocab_size, target.eos_token_ids)
        self.call_grammars = CallGrammars(self.grammars, self.runner, tokenizer)

    def __repr__(self) -> str:
        plan, drafter = self.plan, self.drafter
        with_drafter = f"{drafter.kind} drafter, block {plan.block}" if drafter else "no drafter"
        return (
            f"<Engine: {self.target.model_type} target of {self.target.num_layers} layers,"
            f" {with_drafter}, {plan.rows} row{'s' * (plan.rows > 1)} of {plan.max_length} tokens,"
            f" {plan.dtype}>"
        )

    # -- what a caller uses -------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Unpack[CancellableOptions]) -> Result:
        """Generates to the end; arguments as for `stream`."""
        check_names(options, CancellableOptions)
        return self.generate_many([prompt], n=1, **options)[0]

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        cancel: CancelCell | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generates for several prompts, as many side by side as the plan has rows.

        Args:
          n: answers for each prompt, one after the other in the list; answer i draws with
            seed + i. Those that start together share the prompt's prefill but for its last chunk.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; expected a list of texts or of ids")
        lives: list[Live] = []
        try:
            for request in [r for p in prompts for r in self._requests(p, n, **options)]:
                lives.append(live := self._live(request, cancel))
                self._compile_for(live)
                while not self._enqueued(live):
                    self.advance()
            while not all(live.done for live in lives):
                self.advance()
        finally:
            for live in lives:
                self.cancel(live)
        return [live.result() for live in lives]

    def stream(self, prompt: Prompt, **options: Unpack[CancellableOptions]) -> Stream:
        """Generates piece by piece.

        Args:
          prompt: a text, or token ids. Text is encoded as it is; see `chat_ids` for templates.
          max_tokens: most tokens to generate; 256 by default.
          min_tokens: end tokens that come before so many tokens become the next best ones.
          block_size: most tokens a round of this request may decide, the plan's at most; changes
            speed, never a token of a greedy request.
          temperature, top_p, top_k, min_p, seed: sampling; temperature 0 is greedy. Without a
            seed every call draws a new one.
          repetition_penalty: divides what speaks for tokens of prompt and output; 1 is off.
          frequency_penalty, presence_penalty: taken from the logits of tokens that were said,
            for each time and once; 0 is off. Greedy requests are penalised as well.
          logit_bias: numbers to add to the logits of token ids.
          logprobs: report the log-probability of every token, and of this many alternatives.
          prompt_logprobs: the same for the prompt, which is fed whole and takes twice its time.
          structured: what the text must follow: {"json": a schema}, {"regex": a pattern},
            {"choice": texts} or {"grammar": a Lark grammar}; {"around": a Lark grammar} beside it
            says what comes around it, which is `@answer` there. Needs the extra `structured`.
          stop: text or texts that end the output; they are not part of it. At most 64, of at most
            256 characters each and 4,096 together.
          stop_token_ids: ids that end the output, besides the model's own end tokens.
          ignore_eos: let the model's end tokens pass.
          speculative: False decodes without drafting; the tokens are the same.
          recovery: rules that act when the model goes silent, stalls or loops; None is off.
            Where output is structured, those that dictate tokens or overrule ends are off.
          tools, tool_choice: the tools the prompt offers, in any API's shape; recovery may
            begin a call of one of them, and inside calls no `stop` text counts.
          cancel: a cell by which anyone, from any thread, may end the request. Unlike `close`,
            it also keeps what the request added out of the prefix cache.

        Raises:
          RequestError: the arguments cannot be served; says why.
          QueueFullError: as many requests wait as the plan allows.
          ComputeError: while iterating, if logits stop being finite or the device fails twice.
        """
        return Stream(self.submit(prompt, **options), self.advance, self.cancel)

    def check(self, prompt: Prompt, **options: Unpack[Options]) -> None:
        """Raises RequestError where `stream` would; compiles nothing and queues nothing."""
        self._requests(prompt, 1, **options)

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
        wanted = [Variant.GREEDY] + [Variant.SAMPLED] * sampled + [Variant.PENALIZED] * shaped
        wanted += [Variant.CONSTRAINED] * masked + [Variant.FORCED_TOKENS] * recovery
        seconds = self.compile(wanted)
        if measure and self.drafter is not None and self.plan.exact:
            self.break_even = self.loop.break_even()
        return seconds

    def compile(self, variants: Iterable[Variant]) -> float:
        """Compile what variants of the programs lack, in this thread; return the seconds."""
        if not self.compiled.missing(variants := list(variants)):
            return 0.0
        workers = 1 if self.busy else WORKERS  # a busy engine needs cores of its own
        with announced(COMPILING, shown=self.progress):
            return self.compiled.compile(variants, workers=workers)

    # -- one by one, for servers --------------------------------------------------------------

    def submit(self, prompt: Prompt, **options: Unpack[CancellableOptions]) -> Live:
        """Queues a request; `advance` runs it. Arguments and errors as for `stream`."""
        check_names(options, CancellableOptions)
        return self.submit_several(prompt, 1, **options)[0]

    def submit_several(
        self,
        prompt: Prompt,
        n: int,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[Options],
    ) -> list[Live]:
        """Queues n requests for one prompt, all of them or none; answer i draws with seed + i."""
        lives = self.prepare(prompt, n, cancel=cancel, **options)
        for live in lives:
            self._compile_for(live)
        return self.enqueue(lives)

    def prepare(
        self,
        prompt: Prompt,
        n: int = 1,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[Options],
    ) -> list[Live]:
        """Check n requests for one prompt and make their grammars; compile and queue nothing.

        Arguments and errors as for `submit_several`. `enqueue` them once `compiled` has the
        programs of the variants that `lanes.variants_of` names.
        """
        return [self._live(request, cancel) for request in self._requests(prompt, n, **options)]

    def enqueue(self, lives: list[Live]) -> list[Live]:
        """Queue prepared requests whose programs are compiled, all of them or none."""
        return self.loop.enqueue(lives)

    def advance(self) -> None:
        """One turn: dispatch a step if any row can use one, then read what is due."""
        self.loop.advance()

    def cancel(self, live: Live) -> None:
        """Ends a request wherever it stands; does nothing if it already ended."""
        self.loop.cancel(live)

    def close(self) -> None:
        """End the grammar process and wait until prefixes are on disk; it may still be used."""
        self.loop.tidy()
        self.grammars.close()
        if self.runner.snapshots and self.runner.snapshots.disk:
            self.runner.snapshots.disk.flush()

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything to do."""
        return self.loop.busy

    @property
    def queued(self) -> int:
        """Requests that wait for a row."""
        return len(self.loop.rows.waiting)

    @property
    def active(self) -> int:
        """Requests that have a row."""
        return self.loop.rows.active

    # -- what it is made of -------------------------------------------------------------------

    @property
    def params(self) -> Params:
        """The parameters of both models; others of the same shapes may be put in their place.

        Raises:
          CheckpointError: they are made otherwise.
          RequestError: requests are running.
        """
        return self.runner.params

    @params.setter
    def params(self, params: Params) -> None:
        self.loop.while_idle(functools.partial(self.runner.exchange, params))

    @property
    def compiled(self) -> CompiledPrograms:
        """The programs of the plan and what of them is compiled, for compiling in other threads."""
        return self.runner.compiled

    @property
    def programs(self) -> dict[str, Program]:
        """Everything the plan may need, by name."""
        return self.compiled.programs

    @property
    def executables(self) -> dict[str, Executable]:
        """What was compiled so far; an engine of the same plan and models may share it."""
        return self.compiled.executables

    @executables.setter
    def executables(self, executables: dict[str, Executable]) -> None:
        self.compiled.executables = executables

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return self.compiled.seconds

    def share_programs(self, other: "Engine") -> None:
        """Share the compiled programs and measurements of an engine with the same models.

        Raises:
          PlanError: the engines' models or `Plan.shape` differ.
        """
        ours, theirs = ((e.target, e.drafter, e.plan.shape) for e in (self, other))
        if ours != theirs:
            raise PlanError(
                "the other engine's programs are of another shape; expected the same models and"
                f" the same plan.shape, {self.plan.shape}"
            )
        self.runner.compiled, self.break_even = other.compiled, other.break_even

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Kept prefixes and their counters; None where the plan keeps none."""
        return None if self.runner.snapshots is None else self.runner.snapshots.cache

    def _requests(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> list[Request]:
        """The checked requests of n answers."""
        check_not_forked()
        options["speculative"] = options.get("speculative", True) and self.drafter is not None
        return requests_of(prompt, n, self.plan, self.target, self.tokenizer, options)

    def _enqueued(self, live: Live) -> bool:
        """Queues a request, unless the queue is full."""
        try:
            self.loop.enqueue([live])
        except QueueFullError:
            return False
        return True

    def _live(self, request: Request, cancel: CancelCell | None) -> Live:
        """A request with its grammar, if it needs one."""
        if not isinstance(cancel, CancelCell | None):
            raise RequestError(f"cancel is {cancel!r}; expected None, or a dj.CancelCell()")
        grammar = None if request.structured is None else self.grammars.make(request.structured)
        free = self.plan.exact and request.temperature == 0  # to change lanes by the clock (R11)
        lanes: dict[str, Any] = {"break_even": self.break_even if free else 0.0, "fixed": not free}
        calls = self.call_grammars if self.call_grammars.available else None
        return Live(request, self.tokenizer, grammar, cancel=cancel, call_grammars=calls, **lanes)

    def _compile_for(self, live: Live) -> None:
        """Compile what a request needs, in this thread."""
        live.delay(self.compile(variants_of(live.request)))
