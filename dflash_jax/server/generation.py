"""Runs a `GenerationRequest` on a model, and yields the events of its outputs."""

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dflash_jax.engine.request import CancelReason as Reason
from dflash_jax.engine.result import Piece, Result
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine import OFF
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import RequestError, StructureError
from dflash_jax.graph.keys import Variant
from dflash_jax.server import errors
from dflash_jax.server.background import (
    LONG_PROMPT,
    SHORT_TEXT,
    Client,
    at_once,
    by_size,
    in_thread,
)
from dflash_jax.server.conversation import parse_tool_calls
from dflash_jax.server.engine_thread import Job
from dflash_jax.server.prompt import (
    EncodedPrompt,
    chat_prompt,
    message_size,
    resolve_max_tokens,
    text_prompts,
)
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.reply import Reply
from dflash_jax.server.served_models import ServedModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax
from dflash_jax.tool_parsers.calls import Event
from dflash_jax.tool_parsers.grammar import answer_grammar, call_grammar
from dflash_jax.tool_parsers.tool_schema import Tool

# The engine's options of a `GenerationRequest`.

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
MOST_GRAMMAR = 2**18  # characters; larger grammars would block other requests for seconds


def sampling_params(
    model: ServedModel, request: GenerationRequest, prompt: EncodedPrompt, cache_salt: str = ""
) -> SamplingParams:
    """Return the options of a request for the engine. Takes time if the request is large."""
    defaults, engine = model.defaults, model.engine
    options: dict[str, Any] = {"temperature": defaults.temperature} | request.options
    options["cache_salt"] = cache_salt
    if request.stop:
        options["stop"] = request.stop
    if request.return_token_sources:
        options["trace"] = True
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
    counts = [request.prompt_logprobs, request.logprobs if request.echo else None]
    if counts := [n for n in counts if n is not None]:
        options["prompt_logprobs"] = max(counts)
    if structure := structure_of(request, prompt, model.syntax, engine.tokenizer):
        options["structured"] = structure
    if len(str(options.get("structured", ""))) > MOST_GRAMMAR:
        raise Problem(
            f"the output grammar or the tools are longer than {MOST_GRAMMAR} characters",
            code="grammar_too_large",
        )
    default = defaults.max_tokens or (COMPLETION_MAX_TOKENS if request.api == "completions" else 0)
    most = resolve_max_tokens(prompt.ids, request, engine.plan.max_length, default)
    recovery = request.recovery or (
        defaults.with_tools if request.declared_tools else defaults.recovery
    )
    if request.thinking_budget is not None and request.thinking_budget < most:
        recovery = dataclasses.replace(recovery, answer_reserve=most - request.thinking_budget)
    if recovery != OFF:
        options["recovery"] = recovery
    if request.declared_tools:
        named = request.tool_choice.name
        choice = {"name": named} if named else request.tool_choice.kind
        options |= {"tools": request.tools, "tool_choice": choice}
    try:
        return SamplingParams(**options, max_tokens=most)
    except RequestError as error:
        raise errors.to_problem(error, request.api) from error


COMPILING_KEEPALIVE_S = 5.0  # seconds between comments in a stream that waits for programs
BYTES_PER_ENTRY = 50  # of a token or an alternative in a response


ReplyUpdate = tuple[int, list[Piece], Result | Exception | None]
ReplyEvents = tuple[Reply, list[Event]] | None


class Generation:
    """All outputs of one request, submitted to the engine on construction.

    Iterate over `events` once; `replies` are complete afterwards.

    Args:
      options: those of each prompt.
      timeout: seconds after which outputs end with the tokens generated so far.
      compile_wait: seconds after which a request that is not streamed is refused if its programs
        are still being compiled.
      request_id: the id in the response headers.
      body_size: bytes of the request, parts of which the response may repeat.
      client: names of who asks, the widest first; clients take turns.

    Attributes:
      cancelled: why the request ended early, and in which phase; None if it did not.
      response_id: set by who writes the response.

    Raises:
      Problem: the model is not ready, the request does not fit, or the queue is full.
    """

    def __init__(
        self,
        model: ServedModel,
        request: GenerationRequest,
        prompts: list[EncodedPrompt],
        options: list[SamplingParams],
        timeout: float | None,
        *,
        compile_wait: float = math.inf,
        request_id: str = "",
        body_size: int = 0,
        client: Client = (),
    ):
        self.model, self.request, self.prompts = model, request, prompts
        self.request_id, self._body_size = request_id, body_size
        self.response_id = ""
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.cancelled: tuple[Reason, str] | None = None
        engine = model.engine
        if not model.worker.has_room(len(prompts) * request.n):
            raise errors.queue_full()
        self.replies: list[Reply] = []
        self._jobs: list[Job] = []
        self._updates: asyncio.Queue[ReplyUpdate] = asyncio.Queue()
        for prompt, params in zip(prompts, options, strict=True):
            for copy in range(request.n):
                index = len(self.replies)
                reply = Reply(
                    index, request, engine.tokenizer, model.syntax,
                    thinking=prompt.thinking, end_ids=self._end_ids,
                )  # fmt: skip
                recovery = params.recovery or OFF
                reply.filter_repeated_calls = request.stream and recovery.repeated_calls > 0
                self.replies.append(reply)
                answer = params.for_answer(copy)
                self._jobs.append(
                    Job(prompt.ids, answer, index, self._on_update, client, request_id)
                )
        loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        if timeout is not None:
            self._timers.append(loop.call_later(timeout, self.cancel, "deadline"))
        if compile_wait < math.inf and not request.stream:  # a stream gets comments instead
            self._timers.append(loop.call_later(compile_wait, self._refuse_uncompiled))
        for job in self._jobs:
            model.worker.submit(job)

    @property
    def _end_ids(self) -> frozenset[int]:
        """Return the end tokens that are no text: all, or all but those that the request keeps."""
        options, found = self.request.options, set()
        if not options.get("ignore_eos"):
            found.update(self.model.engine.graph.config.eos_token_ids)
        if not self.request.include_stop_str:
            found.update(options.get("stop_token_ids") or ())
        return frozenset(found)

    def _on_update(self, index: int, pieces: list[Piece], end: Result | Exception | None) -> None:
        self._updates.put_nowait((index, pieces, end))

    def cancel(self, reason: Reason) -> None:
        """End all outputs. After a deadline, the tokens generated so far are the response.

        A request whose programs or grammar are still being compiled at the deadline has no output,
        and is refused. So is every request at shutdown: a client would take a cut answer for one.
        """
        pending = any(job.pending for job in self._jobs)
        if reason == "shutdown":
            self.cancelled = self.cancelled or (reason, self.phase)
            self._refuse(errors.shutting_down())
            return
        if reason == "deadline" and self.waits_for:
            self._refuse_uncompiled()
            return
        if reason == "deadline" and pending:
            self._refuse(errors.unfinished())
            return
        if any(reply.result is None for reply in self.replies):
            self.cancelled = self.cancelled or (reason, self.phase)
        self._cancel_jobs(reason)

    def _refuse_uncompiled(self) -> None:
        if waits_for := self.waits_for:
            self._refuse(errors.still_compiling(self.model.engine.core.runner.compiled, waits_for))

    def _refuse(self, problem: Problem) -> None:
        self._updates.put_nowait((0, [], problem))

    def _cancel_jobs(self, reason: Reason) -> None:
        for job, reply in zip(self._jobs, self.replies, strict=True):
            if reply.result is None:
                reply.ended_by = reply.ended_by or reason
                self.model.worker.cancel(job, None if reason == "deadline" else reason)

    @property
    def waits_for(self) -> tuple[Variant, ...]:
        """Return the program variants that must be compiled before the request can start."""
        return next((job.waits_for for job in self._jobs if job.waits_for), ())

    @property
    def status(self) -> str:
        """Return the progress of the request as text, for keepalive comments."""
        if not (waits_for := self.waits_for):
            fed, prompts = self.progress
            return f"keepalive {fed}/{prompts}"
        compiled = self.model.engine.core.runner.compiled
        missing, needed = compiled.missing(waits_for), compiled.keys(waits_for)
        done = len(needed) - len(missing)
        return f"compiling {', '.join(waits_for)}: {done} of {len(needed)} programs"

    @property
    def progress(self) -> tuple[int, int]:
        """Return the number of prompt tokens processed so far, and of all prompt tokens."""
        fed = sum(job.handle.num_fed for job in self._jobs if job.handle)
        return fed, sum(len(job.prompt) for job in self._jobs)

    @property
    def cached(self) -> int:
        """Return the cached prompt tokens, which are known with the first output."""
        return max((job.handle.num_cached for job in self._jobs if job.handle), default=0)

    @property
    def phase(self) -> str:
        """Return "queued", "prompt" (prefill) or "output" (decode)."""
        if self.first_token is not None:
            return "output"
        return "prompt" if self.progress[0] else "queued"

    @property
    def answer_size(self) -> int:
        """Return the approximate number of bytes of the whole response."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts) * self.request.n
        tokens = prompt_tokens + sum(len(reply.ids) for reply in self.replies)
        alternatives = max(self.request.logprobs or 0, self.request.prompt_logprobs or 0)
        return self._body_size + BYTES_PER_ENTRY * tokens * (1 + alternatives)

    async def _next_update(self, pause: float | None) -> ReplyUpdate | None:
        """Return the next update, or None if none arrives for `pause` seconds."""
        try:
            async with asyncio.timeout(pause):
                return await self._updates.get()
        except TimeoutError:
            return None

    async def events(self, pause: float | None = None) -> AsyncGenerator[ReplyEvents]:
        """Yield replies with their new events; `reply.result` is set with the last ones.

        The first item, without events, means that the engine accepted the request.

        Args:
          pause: yield None after this many seconds without an update, or after a shorter time while
            programs are being compiled.
        """
        left, failed = len(self._jobs), False
        try:
            while left:
                shorter = pause if pause is None else min(pause, COMPILING_KEEPALIVE_S)
                update = await self._next_update(shorter if self.waits_for else pause)
                if update is None:
                    yield None
                    continue
                index, pieces, end = update
                reply = self.replies[index]
                if isinstance(end, Exception):
                    failed = True
                    if isinstance(end, StructureError):
                        raise structure_problem(end, self.request)
                    raise errors.to_problem(end, self.request.api)
                if pieces and self.first_token is None:
                    self.first_token = time.perf_counter()
                events = [event for piece in pieces for event in reply.push(piece)]
                if reply.satisfied and pieces and end is None:
                    self.model.worker.cancel(self._jobs[index])
                if end is not None:
                    left -= 1
                    size = BYTES_PER_ENTRY * len(reply.ids)  # it may parse all of them again
                    events += await by_size(size, reply.finish, end)
                    called = reply.calls and reply.finish_reason == "tool_calls"
                    if called and not reply.shortened:  # a shortened answer differs from its ids
                        with contextlib.suppress(Problem):  # caching is optional
                            await in_thread(self._remember, reply)
                yield reply, events
        finally:
            for timer in self._timers:
                timer.cancel()
            if failed:  # not counted as a cancellation
                self._cancel_jobs("disconnect")
            elif left:
                self.cancel("disconnect")
            self.model.last_used_ms = int(time.time() * 1000)

    def _remember(self, reply: Reply) -> None:
        """Store a tool turn's ids for the next prompt of the conversation."""
        stop = set(self.model.engine.graph.config.eos_token_ids)
        ids = list(reply.ids)
        while ids and ids[-1] in stop:
            ids.pop()
        if (lead := self.prompts[reply.index // self.request.n].lead()) is None:
            return
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
        message = {"content": reply.content, "tool_calls": parse_tool_calls(calls, "")}
        self.model.tool_turns.put(message, [*lead, *ids])


async def prepare(model: ServedModel, request: GenerationRequest) -> list[EncodedPrompt]:
    """Return the prompts of a request, built in a thread unless they are short texts.

    Long ones may take seconds, and so may a chat template.
    """
    engine = model.engine
    tokenizer, most = engine.tokenizer, engine.plan.max_length
    if request.messages is None:
        size = len(request.suffix) + sum(map(len, request.prompts))
        make = functools.partial(text_prompts, request, tokenizer, most)
        if size <= SHORT_TEXT:
            return at_once(make, param=request.source)
        return await in_thread(make, long=size > LONG_PROMPT, param=request.source)
    thought = model.syntax.thought if model.syntax else None
    size = sum(map(message_size, request.messages)) + 200 * len(request.tools)
    make = functools.partial(chat_prompt, request, tokenizer, model.tool_turns, thought, most)
    return [await in_thread(make, long=size > LONG_PROMPT, param=request.source)]


# Grammars of reasoning and tool calls, around an answer with a grammar of its own.


def structure_of(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax | None,
    tokenizer: Tokenizer | None,
) -> Mapping[str, Any] | None:
    """Return what the output has to follow, as `SamplingParams.structured`; None if nothing.

    A required call leaves no content, so that `request.grammar` does not apply. It is the first
    that is written, unless the prompt opens reasoning.
    """
    if syntax and syntax.thought and syntax.thought.is_open(prompt.prefix):
        prompt = dataclasses.replace(prompt, thinking=True)
    try:
        if request.requires_call:
            if syntax is None or tokenizer is None:
                raise Problem("this model's template knows no tool calls", param="tool_choice")
            # A thought that the prompt did not open could be free text of any length.
            prompt = dataclasses.replace(prompt, may_think=False)
            return {"grammar": _calls(request, prompt, syntax, tokenizer)}
        if request.grammar is None:
            return None
        around = grammar_around(request, prompt, syntax, tokenizer)
    except RequestError as error:
        raise Problem(str(error), param="tools") from None
    kind, value = request.grammar
    structure = {kind: value}
    if around is not None:
        structure["around"] = around
    if prefix := _answer_begun(prompt, syntax):
        structure["prefix"] = prefix
    return structure


def structure_problem(error: StructureError, request: GenerationRequest) -> Problem:
    """Return the response to a structure that cannot be followed, with the field it comes from."""
    if error.of_prompt:
        return Problem(str(error), param=request.source)
    field = "tools" if request.requires_call else request.grammar_field
    return Problem(str(error), param=field)


def usable_tools(request: GenerationRequest, grammars: Grammars) -> GenerationRequest:
    """Return the request with tools whose arguments a grammar can follow.

    Keywords that grammars do not support or that contradict others, such as patterns that look
    ahead, are left out with a warning, and so are tools that still take no arguments. It may take
    about a second.

    Raises:
      Problem: something of a strict tool would be left out, or no tool is left.
    """
    auto = request.tool_choice.kind == "auto" and request.grammar is not None
    wanted = request.declared_tools and (auto or request.requires_call)
    if not wanted or not grammars.available:
        return request
    try:
        end = grammars.deadline()
    except RequestError as error:
        raise Problem(str(error)) from None
    kept: list[Tool] = []
    refused: list[Problem] = []
    warnings = list(request.warnings)
    named = request.tool_choice.name
    for tool in request.declared_tools:
        if named not in (None, tool.name):
            kept.append(tool)
            continue
        found = grammars.usable_schema(tool.parameters, end)
        for path, key, reason in found.dropped:
            if tool.strict:
                raise _tool_problem(tool, f"{path}/{key}", reason)
            warnings.append(f"the tool {tool.name!r}: {key} at {path} was ignored: {reason}")
        if found.refused is not None:
            refused.append(_tool_problem(tool, *found.refused))
            if tool.strict or tool.name == named:
                raise refused[-1]
            warnings.append(f"{refused[-1]}; it was left out, so that it cannot be called")
            continue
        kept.append(dataclasses.replace(tool, parameters=found.schema) if found.dropped else tool)
    if not kept:
        raise refused[0]
    return dataclasses.replace(request, declared_tools=tuple(kept), warnings=tuple(warnings))


def _tool_problem(tool: Tool, path: str, reason: str) -> Problem:
    strict = " of a strict tool" if tool.strict else ""
    return Problem(
        f"the tool {tool.name!r}: the schema{strict} is not supported at {path}: {reason}",
        param="tools",
    )


def _answer_begun(prompt: EncodedPrompt, syntax: Syntax | None) -> str:
    """Return the beginning of an answer that the prompt ends with, without reasoning before it."""
    if prompt.thinking:
        return ""
    if syntax is None or syntax.thought is None:
        return prompt.prefix
    _, closing, answer = prompt.prefix.rpartition(syntax.thought.closing)
    return answer.lstrip("\n") if closing else answer


def grammar_around(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax | None,
    tokenizer: Tokenizer | None,
) -> str | None:
    """Return the grammar of reasoning and calls around the rule `answer`; None without either.

    Reasoning is free text, and comes first. Completions have none.
    """
    if syntax is None or tokenizer is None or request.api == "completions":
        return None
    if request.declared_tools and request.tool_choice.kind == "auto":
        return _calls(request, prompt, syntax, tokenizer, answer=True)
    if syntax.thought is None:
        return None
    return answer_grammar(
        syntax,
        tokenizer.special_texts,
        thinking=prompt.thinking,
        thoughts=_may_think(request, prompt, syntax, tokenizer),
    )


def _calls(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax,
    tokenizer: Tokenizer,
    *,
    answer: bool = False,
) -> str:
    return call_grammar(
        syntax,
        request.declared_tools,
        request.tool_choice,
        tokenizer.special_texts,
        thinking=prompt.thinking,
        thoughts=_may_think(request, prompt, syntax, tokenizer),
        parallel=request.parallel_tool_calls,
        answer=answer,
    )


def _may_think(
    request: GenerationRequest, prompt: EncodedPrompt, syntax: Syntax, tokenizer: Tokenizer
) -> bool:
    """Return whether an output may begin with reasoning: its model was trained to write some."""
    if not prompt.may_think or request.template_kwargs.get("enable_thinking") is False:
        return False
    template, thought = tokenizer.teaches or "", syntax.thought
    marks = (thought.opening.strip(), thought.closing.strip()) if thought else ()
    return any(mark in template for mark in marks)
