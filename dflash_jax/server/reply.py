"""One output as a client sees it: thoughts, content and calls, and why it ended."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash_jax.engine.detokenizer import OutputText
from dflash_jax.engine.recovery import repeated_calls
from dflash_jax.engine.result import Piece, Result, TokenLogprob
from dflash_jax.server.held_calls import RepeatedCallFilter
from dflash_jax.server.protocol import GenerationRequest, new_id
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax
from dflash_jax.tool_parsers.events import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    joined,
)
from dflash_jax.tool_parsers.stream import OutputParser

LOOPS = ("repeat", "runaway", "period", repeated_calls.KIND)  # rules that end a looping output
DROPPED = ("runaway_dropped_tokens", "repeated_calls_dropped_tokens")  # at the end of whole answers


@dataclasses.dataclass
class ToolCall:
    """A tool call; `arguments` is JSON text, whole once `done`."""

    id: str
    name: str
    arguments: str = ""
    done: bool = False


@dataclasses.dataclass
class ReplyPart:
    """A piece of an answer; they stand in the order in which they were written."""

    kind: str  # "thoughts", "content" or "call"
    text: str = ""
    call: ToolCall | None = None


class Reply:
    """Turns the pieces of one output into events, and keeps their sum.

    Args:
      index: which of the request's outputs it is.
      thinking: the prompt opened a thought.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        syntax: Syntax | None,
        *,
        thinking: bool = False,
    ):
        self.index, self._request = index, request
        chat = request.api != "completions"
        syntax = syntax if chat else None
        if tokenizer and syntax:
            tokenizer = tokenizer.showing(syntax.markers(calls=bool(request.declared_tools)))
        self._tokenizer, self._syntax, self._starts_thinking = tokenizer, syntax, thinking
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of `ids`, where they were asked for
        self.reported = 0  # log-probabilities in chunks that were sent
        self.logprob_text = (
            tokenizer.stream() if tokenizer else None
        )  # the text of the tokens among them
        self.thinking_tokens = 0
        # Nothing more is wanted: a stop string came, the only call is done, or there is no room.
        self.satisfied = request.max_tokens == 0
        self.result: Result | None = None
        self.filter_repeated_calls = (
            False  # hold back streamed calls that may repeat the one before
        )
        self._repeated_calls = RepeatedCallFilter()
        self.shortened = False  # the answer lacks tokens that are among `ids`
        self.ended_by = ""  # why the server ended it: "deadline", "call", ...
        self._reset()

    def _reset(self) -> None:
        """Nothing was read yet."""
        request = self._request
        among_calls = bool(
            self._syntax and request.declared_tools
        )  # in which no stop string counts
        self._text = OutputText(self._tokenizer, () if among_calls else request.stop)
        self._parser = OutputParser(
            self._syntax,
            request.declared_tools,
            thinking=self._starts_thinking,
            stop=request.stop if among_calls else (),
            lenient=request.grammar is None,
        )
        self.content = self.reasoning = ""
        self.answer_logprobs: list[TokenLogprob] = []  # those outside thoughts and calls
        self.calls: list[ToolCall] = []
        self._parts: list[ReplyPart] = []

    def push(self, piece: Piece) -> list[Event]:
        """What a piece adds; texts of one kind in a row are one event."""
        events: list[Event] = []
        for at, token in enumerate(piece.token_ids):
            if self.satisfied:
                break
            self.ids.append(token)
            self.logprobs += (logprobs := piece.logprobs[at : at + 1])
            new, thinking = self._read(token, logprobs)
            events += new
            self.thinking_tokens += thinking
            if self.stop_string is not None:
                self.satisfied = True
        return list(joined(events))

    def _read(self, token: int, logprobs: Sequence[TokenLogprob]) -> tuple[list[Event], bool]:
        """What a token adds, and whether it is one of a thought."""
        parser = self._parser
        thinking, calling = parser.thinking, parser.calling
        events = self._filter_and_apply(parser.push(self._text.push([token])))
        thinking, calling = thinking or parser.thinking, calling or parser.calling
        if not (thinking or calling):
            self.answer_logprobs += logprobs
        return events, thinking

    def _drop_last_tokens(self, count: int) -> None:
        """Leaves the last tokens out of what was said; they stay among `ids`."""
        self._reset()
        for at, token in enumerate(self.ids[: len(self.ids) - count]):
            self._read(token, self.logprobs[at : at + 1])

    def finish(self, result: Result) -> list[Event]:
        """What was held back, once the engine is done."""
        self.result = result
        looped = max(result.stats.recovery[name] for name in DROPPED)
        if looped and not (
            self._request.stream or self.satisfied or self.ended_by
        ):  # what was sent stays
            self._drop_last_tokens(looped)
            self.shortened = True
        events = (
            []
            if self.ended_by == "call"
            else self._filter_and_apply(self._parser.push(self._text.finish()))
        )
        if self.ended_by != "call":
            events += self._filter_and_apply(self._parser.finish())
        if not self._ended_early:  # what the model itself left unfinished stays so
            events += self._filter_and_apply(self._parser.unfinished_call())
        if result.stats.recovery[repeated_calls.KIND]:
            self.shortened |= self._repeated_calls.drop()
        events += self._apply(self._repeated_calls.release())
        if self._request.include_stop_str and self.stop_string:
            kind = Thinking if self._parser.thinking else Content
            events += self._filter_and_apply([kind(self.stop_string)])
        return list(joined(events))

    def _filter_and_apply(self, events: list[Event]) -> list[Event]:
        return self._apply(
            self._repeated_calls.push(events) if self.filter_repeated_calls else events
        )

    def _apply(self, events: list[Event]) -> list[Event]:
        """Add events to the answer; return those that are part of it."""
        for at, event in enumerate(events):
            match event:
                case Content(text):
                    self.content += text
                    self._append("content", text)
                case Thinking(text):
                    self.reasoning += text
                    self._append("reasoning", text)
                case ToolCallStart(_, name):
                    self.calls.append(ToolCall(new_id("call_"), name))
                    self._parts.append(ReplyPart("call", call=self.calls[-1]))
                case ToolCallDelta(index, text):
                    self.calls[index].arguments += text
                case ToolCallEnd(index):
                    call = self.calls[index]
                    call.done, call.arguments = True, call.arguments or "{}"
                    if not self._request.parallel_tool_calls:
                        self.satisfied, self.ended_by = True, "call"
                        return events[: at + 1]
        return events

    def _append(self, kind: str, text: str) -> None:
        """Goes on with a part, or begins one."""
        if not self._parts or self._parts[-1].kind != kind:
            self._parts.append(ReplyPart(kind))
        self._parts[-1].text += text

    @property
    def parts(self) -> list[ReplyPart]:
        """The answer in order, without calls whose arguments are not complete."""
        return [part for part in self._parts if part.call is None or part.call.done]

    @property
    def done_calls(self) -> list[ToolCall]:
        """Calls whose arguments are complete."""
        return [call for call in self.calls if call.done]

    @property
    def _ended_early(self) -> bool:
        """Whether a limit or the caller ended the output, not the model."""
        assert self.result is not None
        return bool(self.ended_by) or self.result.finish_reason in ("length", "cancelled")

    @property
    def _ends_in_call(self) -> bool:
        """Whether the output was cut short inside a tool call."""
        return self._parser.calling and self._parser.unfinished and self._ended_early

    @property
    def undeclared(self) -> list[str]:
        """Tools that were called and not declared, each once."""
        return list(dict.fromkeys(self._parser.undeclared))

    @property
    def warnings(self) -> list[str]:
        """Return what a caller should know about the output's tool calls."""
        found = [
            f"the model called the tool {name!r}, which the request does not declare; the call is"
            " passed on as the model made it"
            for name in self.undeclared
        ]
        if self._parser.unreadable:
            found.append("a tool call could not be read; it is part of the text")
        if self._ends_in_call:
            found.append(
                "the output was cut inside a tool call, which is incomplete; it is left out of"
                " answers that are not streamed"
            )
        return found

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return self._text.stopped_by or self._parser.stopped_by

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words: stop, length or tool_calls."""
        assert self.result is not None
        if self.done_calls and not self._ends_in_call:
            return "tool_calls"
        if self.ended_by == "call" or self.stop_string:
            return "stop"
        if self._request.max_tokens == 0 or self.result.finish_reason in ("length", "cancelled"):
            return "length"
        return "stop"

    @property
    def details(self) -> dict[str, Any]:
        """`finish_details`: the exact reason, and what the tokens were."""
        assert self.result is not None
        stats = self.result.stats
        loop = next((kind for kind in LOOPS if stats.recovery[kind]), None)
        reason = self.ended_by or (
            "stop_sequence" if self.stop_string else self.result.finish_reason
        )
        total = 0 if self._request.max_tokens == 0 else stats.output_tokens
        found: dict[str, Any] = {
            "reason": {"stop": "end_of_turn", "call": "one_tool_call"}.get(reason, reason),
            "thinking_tokens": self.thinking_tokens,
            "content_tokens": total - self.thinking_tokens,
            "total_tokens": total,
        }
        if self.undeclared:
            found["undeclared_tools"] = self.undeclared
        if self._parser.unreadable:
            found["unreadable_calls"] = self._parser.unreadable
        if self._ends_in_call:
            found["unfinished_call"] = True
        if self.stop_string:
            found["stop_sequence"] = self.stop_string
        if self.thinking_tokens:
            forced = stats.recovery["thought_closed"] + stats.recovery["thought_closed_by_force"]
            found["close_kind"] = "hard" if forced else "natural"
        if loop:
            found |= {"degenerate_decode": True, "degenerate_kind": loop}
        if stats.recovery:
            found["recovery"] = {kind: n for kind, n in stats.recovery.items() if n}
        return found
