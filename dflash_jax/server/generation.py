"""Runs a `GenerationRequest` on a model, and yields the events of its outputs."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator

from dflash_jax.engine.request import CancelReason as Reason
from dflash_jax.engine.result import Piece, Result
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine import OFF
from dflash_jax.engine.state_machine.announcements import introduces_call
from dflash_jax.errors import StructureError
from dflash_jax.graph.keys import Variant
from dflash_jax.server import errors
from dflash_jax.server.background import Client, by_size, in_thread
from dflash_jax.server.conversation import parse_tool_calls
from dflash_jax.server.engine_thread import PendingOutput
from dflash_jax.server.output_structure import structure_problem
from dflash_jax.server.prompt import EncodedPrompt
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.reply import Reply
from dflash_jax.server.served_models import ServedModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.calls import Event

COMPILING_KEEPALIVE_S = 5.0  # seconds between comments in a stream that waits for programs
BYTES_PER_ENTRY = 50  # bytes of a response that a token takes, and each of its alternatives
# The index of an output, its new pieces, and at the end its result or error.
ReplyUpdate = tuple[int, list[Piece], Result | Exception | None]
# A reply with its new events; None is a pause.
ReplyEvents = tuple[Reply, list[Event]] | None


class Generation:
    """All outputs of one request, submitted to the engine on construction.

    Iterate over `events` once; `replies` are complete afterwards.

    Args:
      options: the engine's options of each prompt.
      timeout: seconds after which outputs end with the tokens generated so far.
      compile_wait: seconds after which a request that is not streamed is refused if its programs
        are still being compiled.
      request_id: the id in the response headers.
      body_size: bytes of the request, parts of which the response may repeat.
      client: names of who asks, the widest first; clients take turns.

    Attributes:
      replies: `request.n` outputs of each prompt, in the order of the prompts.
      cancelled: why the request ended early, and in which phase; None if it did not.
      started: time of `time.perf_counter` at which the request was submitted.
      first_token: the same for the first output; None before it.
      response_id: id of the response, set by its writer.

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
        self.model = model
        self.request = request
        self.prompts = prompts
        self.request_id = request_id
        self._body_size = body_size
        self.response_id = ""
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.cancelled: tuple[Reason, str] | None = None
        engine = model.engine
        if not model.engine_thread.has_room(len(prompts) * request.n):
            raise errors.queue_full()
        self.replies: list[Reply] = []
        self._outputs: list[PendingOutput] = []
        self._updates: asyncio.Queue[ReplyUpdate] = asyncio.Queue()
        for prompt, params in zip(prompts, options, strict=True):
            for copy in range(request.n):
                index = len(self.replies)
                self.replies.append(self._new_reply(index, engine.tokenizer, prompt, params))
                answer = params.for_answer(copy)
                output = PendingOutput(
                    prompt.ids, answer, index, self._on_update, client, request_id
                )
                self._outputs.append(output)
        loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        if timeout is not None:
            self._timers.append(loop.call_later(timeout, self.cancel, "deadline"))
        if compile_wait < math.inf and not request.stream:  # a stream gets comments instead
            self._timers.append(loop.call_later(compile_wait, self._refuse_uncompiled))
        for output in self._outputs:
            model.engine_thread.submit(output)

    def _new_reply(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        prompt: EncodedPrompt,
        params: SamplingParams,
    ) -> Reply:
        recovery = params.recovery or OFF
        reply = Reply(
            index,
            self.request,
            tokenizer,
            self.model.syntax,
            thinking=prompt.thinking,
            end_ids=self._end_ids,
            fenced=introduces_call if recovery.fenced_calls else None,
        )
        reply.filter_repeated_calls = self.request.stream and recovery.repeated_calls > 0
        return reply

    @property
    def _end_ids(self) -> frozenset[int]:
        """Return the end tokens that are no text: all, or all but those that the request keeps."""
        options = self.request.options
        end_ids: set[int] = set()
        if not options.get("ignore_eos"):
            end_ids.update(self.model.engine.graph.config.eos_token_ids)
        if not self.request.include_stop_str:
            end_ids.update(options.get("stop_token_ids") or ())
        return frozenset(end_ids)

    def _on_update(self, index: int, pieces: list[Piece], end: Result | Exception | None) -> None:
        self._updates.put_nowait((index, pieces, end))

    def cancel(self, reason: Reason) -> None:
        """End all outputs. After a deadline, the tokens generated so far are the response.

        A request whose programs or grammar are still being compiled at the deadline has no output,
        and is refused. So is every request at shutdown: a client would take a cut answer for one.
        """
        if reason == "shutdown":
            self._note_cancelled(reason)
            self._refuse(errors.shutting_down())
        elif reason == "deadline" and self.waits_for:
            self._refuse_uncompiled()
        elif reason == "deadline" and any(output.pending for output in self._outputs):
            self._refuse(errors.unfinished())
        else:
            if any(reply.result is None for reply in self.replies):
                self._note_cancelled(reason)
            self._cancel_jobs(reason)

    def _note_cancelled(self, reason: Reason) -> None:
        if self.cancelled is None:
            self.cancelled = (reason, self.phase)

    def _refuse_uncompiled(self) -> None:
        if waits_for := self.waits_for:
            self._refuse(errors.still_compiling(self.model.engine.core.runner.compiled, waits_for))

    def _refuse(self, problem: Problem) -> None:
        self._updates.put_nowait((0, [], problem))

    def _cancel_jobs(self, reason: Reason) -> None:
        # After a deadline the answer is complete as it is.
        output_reason = None if reason == "deadline" else reason
        for output, reply in zip(self._outputs, self.replies, strict=True):
            if reply.result is None:
                reply.ended_by = reply.ended_by or reason
                self.model.engine_thread.cancel(output, output_reason)

    @property
    def waits_for(self) -> tuple[Variant, ...]:
        """Return the program variants that must be compiled before the request can start."""
        return next((output.waits_for for output in self._outputs if output.waits_for), ())

    @property
    def status(self) -> str:
        """Return the progress of the request as text, for keepalive comments."""
        waits_for = self.waits_for
        if not waits_for:
            num_computed, num_tokens = self.progress
            return f"keepalive {num_computed}/{num_tokens}"
        compiled = self.model.engine.core.runner.compiled
        num_missing = len(compiled.missing(waits_for))
        num_needed = len(compiled.keys(waits_for))
        done = num_needed - num_missing
        return f"compiling {', '.join(waits_for)}: {done} of {num_needed} programs"

    @property
    def progress(self) -> tuple[int, int]:
        """Return the number of prompt tokens processed so far, and of all prompt tokens."""
        num_computed = sum(output.handle.num_computed for output in self._outputs if output.handle)
        num_tokens = sum(len(output.prompt) for output in self._outputs)
        return num_computed, num_tokens

    @property
    def cached(self) -> int:
        """Return the number of cached prompt tokens, which is known with the first output."""
        return max(
            (output.handle.num_cached for output in self._outputs if output.handle), default=0
        )

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
        """Return the next update, or None if none arrives in time; see `events` for `pause`."""
        if pause is not None and self.waits_for:
            pause = min(pause, COMPILING_KEEPALIVE_S)
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
        unfinished = len(self._outputs)
        failed = False
        try:
            while unfinished:
                update = await self._next_update(pause)
                if update is None:
                    yield None
                    continue
                index, pieces, end = update
                if isinstance(end, Exception):
                    failed = True
                    raise self._to_problem(end)
                if pieces and self.first_token is None:
                    self.first_token = time.perf_counter()
                reply = self.replies[index]
                events: list[Event] = []
                for piece in pieces:
                    events += reply.push(piece)
                if end is not None:
                    unfinished -= 1
                    events += await self._finish(reply, end)
                elif reply.satisfied and pieces:
                    self.model.engine_thread.cancel(self._outputs[index])
                yield reply, events
        finally:
            for timer in self._timers:
                timer.cancel()
            if failed:  # not counted as a cancellation
                self._cancel_jobs("disconnect")
            elif unfinished:
                self.cancel("disconnect")
            self.model.last_used_ms = int(time.time() * 1000)

    def _to_problem(self, error: Exception) -> Problem:
        if isinstance(error, StructureError):
            return structure_problem(error, self.request)
        return errors.to_problem(error, self.request.api)

    async def _finish(self, reply: Reply, result: Result) -> list[Event]:
        """Return the last events of an output, and remember its ids if it calls tools."""
        size = BYTES_PER_ENTRY * len(reply.ids)  # `finish` may parse all of them again
        events = await by_size(size, reply.finish, result)
        calls_tools = reply.calls and reply.finish_reason == "tool_calls"
        if calls_tools and not reply.shortened:  # a shortened answer differs from its ids
            with contextlib.suppress(Problem):  # remembering is optional
                await in_thread(self._remember, reply)
        return events

    def _remember(self, reply: Reply) -> None:
        """Store a tool turn's ids for the next prompt of the conversation."""
        end_ids = self.model.engine.graph.config.eos_token_ids
        ids = list(reply.ids)
        while ids and ids[-1] in end_ids:
            ids.pop()
        lead = self.prompts[reply.index // self.request.n].lead()
        if lead is None:
            return
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
        message = {"content": reply.content, "tool_calls": parse_tool_calls(calls, "")}
        self.model.tool_turns.put(message, [*lead, *ids])
