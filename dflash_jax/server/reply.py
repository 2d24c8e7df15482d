"""One output as the client sees it: reasoning, content, tool calls and the finish reason."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.engine.result import Piece, Result, RoundTrace, TokenLogprob
from dflash_jax.engine.state_machine import guards, rules
from dflash_jax.engine.vocabulary import markup_ids
from dflash_jax.server.protocol import GenerationRequest, new_id
from dflash_jax.server.repeated_calls import RepeatedCallFilter
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax
from dflash_jax.tool_parsers.calls import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    joined,
)
from dflash_jax.tool_parsers.stream import OutputParser

# Counters of tokens that recovery leaves out at the end of an answer.
DROPPED = ("runaway_dropped_tokens", "repeated_calls_dropped_tokens")


@dataclasses.dataclass
class ToolCall:
    """A tool call of an output.

    Attributes:
      arguments: JSON text, complete once `done`.
    """

    id: str
    name: str
    arguments: str = ""
    done: bool = False


@dataclasses.dataclass
class ReplyPart:
    """A run of reasoning or content, or a tool call, in output order."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class Reply:
    """One output of a request: parses its pieces into events, and accumulates them.

    Args:
      index: position among the outputs of the request.
      thinking: the prompt ends inside reasoning.
      end_ids: tokens that end the output, and are not part of its text.
      fenced: see `OutputParser`.

    Attributes:
      ids: output token ids.
      rounds: rounds of decoding that the engine reported; see `take_rounds`.
      logprobs: log probabilities of `ids`, if requested.
      answer_logprobs: log probabilities of the tokens outside reasoning and tool calls.
      reported: number of log probabilities that were sent in chunks.
      logprob_text: text of the tokens whose log probabilities were sent.
      thinking_tokens: number of tokens of reasoning.
      result: what the engine returned for the output; None until it finished.
      satisfied: no further output is needed: a stop string was found, the only allowed call is
        complete, or max_tokens is 0.
      filter_repeated_calls: hold back streamed calls that may repeat the previous one.
      shortened: the answer leaves out tokens that are among `ids`.
      ended_by: why the server ended the output ("deadline", "call", ...); empty if it did not.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        syntax: Syntax | None,
        *,
        thinking: bool = False,
        end_ids: Collection[int] = (),
        fenced: Callable[[str], bool] | None = None,
    ):
        self.index = index
        self._request = request
        self._fenced = fenced
        if request.api == "completions":  # completions have only text
            syntax = None
        markers = syntax.markers(calls=bool(request.declared_tools)) if syntax else ()
        self._end_ids = frozenset(end_ids)
        if tokenizer:  # the parser needs end tokens that are markup, such as the end of a call
            self._end_ids -= markup_ids(tokenizer, markers)
        if tokenizer and syntax:
            tokenizer = tokenizer.showing(markers)
        self._tokenizer = tokenizer
        self._syntax = syntax
        self._starts_thinking = thinking
        self._takes_engine_text = self._engine_text_suffices()
        self.ids: list[int] = []
        self.rounds: list[RoundTrace] = []
        self._taken_rounds = 0
        self._taken_tokens = 0  # tokens of the rounds that were taken
        self.logprobs: list[TokenLogprob] = []
        self.reported = 0
        self.logprob_text = tokenizer.stream() if tokenizer else None
        self.thinking_tokens = 0
        self.satisfied = request.max_tokens == 0
        self.result: Result | None = None
        self.filter_repeated_calls = False
        self._repeated_calls = RepeatedCallFilter()
        self.shortened = False
        self.ended_by = ""
        self._reset()

    def _engine_text_suffices(self) -> bool:
        """Return whether `Piece.text` can be used instead of decoding the ids a second time.

        It cannot where the parser needs special tokens that the engine leaves out, where tokens
        have to be counted as reasoning one by one, or where the stop string or token, which the
        engine leaves out as well, has to be known.
        """
        syntax = self._syntax
        request = self._request
        has_parts = syntax is not None and bool(syntax.thought or request.declared_tools)
        shows_special = self._tokenizer is not None and bool(self._tokenizer.shown)
        keeps_stop_token = request.include_stop_str and bool(request.options.get("stop_token_ids"))
        return not (has_parts or shows_special or request.stop or keeps_stop_token)

    def _reset(self) -> None:
        """Begin the answer, or begin it again."""
        request = self._request
        # With tools, the parser looks for stop strings: they do not count inside calls.
        parser_stops = bool(self._syntax and request.declared_tools)
        stop = () if parser_stops else request.stop
        self._text = Detokenizer(self._tokenizer, stop, end_ids=self._end_ids)
        self._parser = OutputParser(
            self._syntax,
            request.declared_tools,
            thinking=self._starts_thinking,
            continued=request.continue_final_message,
            stop=request.stop if parser_stops else (),
            lenient=request.grammar is None,
            fenced=self._fenced,
        )
        self.content = ""
        self.reasoning = ""
        self.answer_logprobs: list[TokenLogprob] = []
        # Log probabilities of tokens that may still turn out to be markup.
        self._open_logprobs: list[TokenLogprob] = []
        self.calls: list[ToolCall] = []
        self._parts: list[ReplyPart] = []

    def push(self, piece: Piece) -> list[Event]:
        """Return the events of a piece; adjacent texts of one kind are one event."""
        self.rounds += piece.trace
        if self._takes_engine_text and not self.satisfied:
            self.ids += piece.token_ids
            self.logprobs += piece.logprobs
            self.answer_logprobs += piece.logprobs
            return self._filter_and_apply(self._parser.push(piece.text))
        events: list[Event] = []
        for at, token in enumerate(piece.token_ids):
            if self.satisfied:
                break
            logprobs = piece.logprobs[at : at + 1]
            self.ids.append(token)
            self.logprobs += logprobs
            token_events, is_thinking = self._push_token(token, logprobs)
            events += token_events
            if is_thinking:
                self.thinking_tokens += 1
            if self.stop_string is not None:
                self.satisfied = True
        return list(joined(events))

    def take_rounds(self) -> list[RoundTrace]:
        """Return the rounds that were not taken before, without tokens after the last of `ids`."""
        rounds = []
        for trace in self.rounds[self._taken_rounds :]:
            shortened = trace.shortened(len(self.ids) - self._taken_tokens)
            self._taken_rounds += 1
            self._taken_tokens += len(shortened.tokens)
            if shortened.tokens:
                rounds.append(shortened)
        return rounds

    def _push_token(self, token: int, logprobs: Sequence[TokenLogprob]) -> tuple[list[Event], bool]:
        """Return the events of a token, and whether it belongs to reasoning."""
        parser = self._parser
        was_thinking = parser.thinking
        text = self._text.push([token])
        events = parser.push(text)
        is_thinking = was_thinking or parser.thinking
        if not is_thinking or any(isinstance(event, Content) for event in events):
            self._open_logprobs += logprobs
        events = self._filter_and_apply(events)
        if not parser.undecided:
            if not text:  # a token without text is part of the answer, unlike hidden markup
                self.answer_logprobs += self._open_logprobs
            self._open_logprobs = []
        return events, is_thinking

    def _drop_last_tokens(self, count: int) -> None:
        """Leave the last tokens out of the answer; they stay in `ids`."""
        self._reset()
        remaining = self.ids[: len(self.ids) - count]
        for at, token in enumerate(remaining):
            self._push_token(token, self.logprobs[at : at + 1])

    def finish(self, result: Result) -> list[Event]:
        """Return the events that were held back until the engine finished the output."""
        self.result = result
        num_dropped = max(result.stats.recovery[name] for name in DROPPED)
        # A stream cannot be shortened: its text has been sent.
        if num_dropped and not (self._request.stream or self.satisfied or self.ended_by):
            self._drop_last_tokens(num_dropped)
            self.shortened = True
        events: list[Event] = []
        if self.ended_by != "call":
            events += self._filter_and_apply(self._parser.push(self._text.finish()))
            events += self._filter_and_apply(self._parser.finish())
        if not self._ended_early:  # the model itself left the call unfinished: it is content
            events += self._filter_and_apply(self._parser.unfinished_call())
        held = self._repeated_calls.release()
        if result.stats.recovery[guards.REPEATED_CALLS]:  # what was held repeats the call before
            if held:
                self.shortened = True
        else:
            events += self._apply(held)
        if self._request.include_stop_str and self.stop_string:
            kind = Thinking if self._parser.thinking else Content
            events += self._filter_and_apply([kind(self.stop_string)])
        return list(joined(events))

    def _filter_and_apply(self, events: list[Event]) -> list[Event]:
        """Add events to the answer, apart from calls that may be repeated; return these events."""
        for event in events:
            if isinstance(event, Content):
                self.answer_logprobs += self._open_logprobs
            if isinstance(event, Content | ToolCallEnd):
                self._open_logprobs = []
        if self.filter_repeated_calls:
            events = self._repeated_calls.push(events)
        return self._apply(events)

    def _apply(self, events: list[Event]) -> list[Event]:
        """Add events to the answer; return those up to the end of the only allowed call."""
        applied: list[Event] = []
        for event in events:
            match event:
                case Content(text):
                    text = self._separated("content", self.content, text)
                    self.content += text
                    self._append("content", text)
                    applied.append(Content(text))
                case Thinking(text):
                    text = self._separated("reasoning", self.reasoning, text)
                    self.reasoning += text
                    self._append("reasoning", text)
                    applied.append(Thinking(text))
                case ToolCallStart(_, name):
                    self.calls.append(ToolCall(new_id("call_"), name))
                    self._parts.append(ReplyPart("call", call=self.calls[-1]))
                    applied.append(event)
                case ToolCallDelta(index, text):
                    self.calls[index].arguments += text
                    applied.append(event)
                case ToolCallEnd(index):
                    call = self.calls[index]
                    call.done = True
                    call.arguments = call.arguments or "{}"
                    applied.append(event)
                    if self._request.takes_one_call:
                        self.satisfied = True
                        self.ended_by = "call"
                        break
        return applied

    def _separated(self, kind: Literal["reasoning", "content"], before: str, text: str) -> str:
        """Return a text as it continues the texts of its kind before it.

        Chat completions have one text of each kind: what follows a call or the other kind begins
        on a new line there. Other APIs have a part for each.
        """
        if not before or self._parts[-1].kind == kind or self._request.api != "chat":
            return text
        spaced = before[-1].isspace() or text[:1].isspace()
        return text if spaced else f"\n{text}"

    def _append(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not self._parts or self._parts[-1].kind != kind:
            self._parts.append(ReplyPart(kind))
        self._parts[-1].text += text

    @property
    def parts(self) -> list[ReplyPart]:
        """Return the parts in output order, without incomplete calls."""
        return [part for part in self._parts if part.call is None or part.call.done]

    @property
    def done_calls(self) -> list[ToolCall]:
        """Return the calls whose arguments are complete."""
        return [call for call in self.calls if call.done]

    @property
    def _ended_early(self) -> bool:
        assert self.result is not None
        return bool(self.ended_by) or self.result.finish_reason in ("length", "cancelled")

    @property
    def _ends_in_call(self) -> bool:
        """Return whether the output was cut short inside a tool call."""
        return self._parser.calling and self._parser.unfinished and self._ended_early

    @property
    def undeclared_tools(self) -> list[str]:
        """Return the names of undeclared tools that were called, without duplicates."""
        return list(dict.fromkeys(self._parser.undeclared))

    @property
    def warnings(self) -> list[str]:
        """Return warnings about the tool calls of the output."""
        warnings = [
            f"the model called the tool {name!r}, which the request does not declare; the call is"
            " passed on as the model made it"
            for name in self.undeclared_tools
        ]
        if self._parser.unreadable:
            warnings.append("a tool call could not be read; it is part of the text")
        if self._ends_in_call:
            warnings.append(
                "the output was cut inside a tool call, which is incomplete; it is left out of"
                " answers that are not streamed"
            )
        return warnings

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that ended the output."""
        return self._text.stopped_by or self._parser.stopped_by

    @property
    def finish_reason(self) -> str:
        """Return OpenAI's finish reason: "stop", "length" or "tool_calls"."""
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
        """Return `finish_details`: the exact reason, and token counts by kind."""
        assert self.result is not None
        stats = self.result.stats
        loop = next((rule for rule in rules.LOOPS if stats.recovery[rule]), None)
        reason = self.result.finish_reason
        if self.ended_by:
            reason = self.ended_by
        elif self.stop_string:
            reason = "stop_sequence"
        total = 0 if self._request.max_tokens == 0 else stats.output_tokens
        details: dict[str, Any] = {
            "reason": {"stop": "end_of_turn", "call": "one_tool_call"}.get(reason, reason),
            "thinking_tokens": self.thinking_tokens,
            "content_tokens": total - self.thinking_tokens,
            "total_tokens": total,
        }
        if self.undeclared_tools:
            details["undeclared_tools"] = self.undeclared_tools
        if self._parser.unreadable:
            details["unreadable_calls"] = self._parser.unreadable
        if self._ends_in_call:
            details["unfinished_call"] = True
        if self.stop_string:
            details["stop_sequence"] = self.stop_string
        if self.thinking_tokens:
            forced = stats.recovery["thought_closed"] + stats.recovery["thought_closed_by_force"]
            details["close_kind"] = "hard" if forced else "natural"
        if loop:
            details["degenerate_decode"] = True
            details["degenerate_kind"] = loop
        if stats.recovery:
            details["recovery"] = {rule: n for rule, n in stats.recovery.items() if n}
        return details
