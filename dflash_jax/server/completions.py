"""OpenAI's completions and chat completions: request decoding, responses and stream chunks."""

import abc
from collections.abc import Mapping
from typing import Any

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.server import writer
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import OpenAIFields, openai_arguments
from dflash_jax.server.freeform import FreeformInput, freeform_input
from dflash_jax.server.generation import Generation
from dflash_jax.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from dflash_jax.server.protocol import MOST_CHOICES, GenerationRequest, Problem, decode
from dflash_jax.server.reasoning import positive_budget, reasoning_options
from dflash_jax.server.reply import Reply
from dflash_jax.server.tools import chat_tools, tool_arguments
from dflash_jax.server.writer import ResponseWriter, sse_data
from dflash_jax.tokenizer import TextStream
from dflash_jax.tool_parsers.calls import (
    Content,
    Event,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

DONE = b"data: [DONE]\n\n"


class OpenAIWriter(ResponseWriter):
    """Base of the writers of chat completions and completions.

    Attributes:
      kind: the `object` field of responses.
      field: the field of a choice that has its new output in a chunk.
    """

    kind = ""
    field = ""

    def error(self, problem: Problem) -> bytes:
        """Return the error object and the end of the stream."""
        return sse_data(problem.to_json()) + DONE

    def close(self) -> bytes:
        """Return the usage chunk, if requested, and the end of the stream."""
        if not self.request.include_usage:
            return DONE
        return sse_data(self._object([]) | self._usage()) + DONE

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        choices = [self._choice(reply) for reply in self.generation.replies]
        return self._object(choices) | self._usage()

    @abc.abstractmethod
    def _choice(self, reply: Reply) -> dict[str, Any]:
        """Return a finished output as an entry of `choices`."""

    def _chunk(
        self,
        reply: Reply,
        new: Any,
        end: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return a chunk with new output of one choice.

        Args:
          new: the new output, in the form of the API.
          end: fields of the choice once its output has ended.
          fields: further fields of the chunk.
        """
        choice: dict[str, Any] = {"index": reply.index, self.field: new, "finish_reason": None}
        choice["logprobs"] = self._new_logprobs(reply)
        choice |= self._new_rounds(reply) | dict(end or {})
        chunk = self._object([choice])
        if self.request.continuous_usage_stats:
            chunk["usage"] = writer.token_usage(self.generation)
        return sse_data(chunk | dict(fields or {}))

    def _new_rounds(self, reply: Reply) -> dict[str, Any]:
        """Return the rounds that were not sent yet as a field of a choice, if requested."""
        if not self.request.return_token_sources:
            return {}
        return {"rounds": list(map(writer.encoded_round, reply.take_rounds()))}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "object": self.kind,
            "id": self.id,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.generation.model.fingerprint,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        usage = writer.token_usage(self.generation)
        return {"usage": usage} | writer.requested_statistics(self.generation)

    def _logprobs(
        self, entries: list[TokenLogprob], before: TextStream | None = None
    ) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice, or None if they were not requested.

        Args:
          before: text of the tokens before `entries`; it is extended by them. None if there are
            none.
        """
        if self.request.logprobs is None:
            return None
        tokenizer = self.generation.model.engine.tokenizer
        as_ids = self.request.tokens_as_ids
        if self.request.api == "chat":
            return chat_logprobs(entries, tokenizer, as_ids=as_ids)
        return completion_logprobs(entries, tokenizer, before, as_ids=as_ids)

    def _new_logprobs(self, reply: Reply) -> dict[str, Any] | None:
        entries = reply.logprobs[reply.reported :]
        reply.reported = len(reply.logprobs)
        return self._logprobs(entries, reply.logprob_text)

    def _prompt_logprobs(self, reply: Reply) -> dict[str, Any]:
        num_top = self.request.prompt_logprobs
        logprobs = None if reply.result is None else reply.result.prompt_logprobs
        if num_top is None or logprobs is None:
            return {}
        tokenizer = self.generation.model.engine.tokenizer
        return {"prompt_logprobs": prompt_logprobs(logprobs, num_top, tokenizer)}

    def _final_fields(self) -> dict[str, Any]:
        """Return additional fields of an output's last chunk."""
        if not self.request.stream or self.request.include_usage:
            return {}
        if len(self.generation.replies) == 1:
            return writer.requested_statistics(self.generation)
        if not all(reply.result for reply in self.generation.replies):
            return {}
        warnings = writer.warnings(self.generation)
        return {"warnings": warnings} if warnings else {}


class ChatRequest(OpenAIFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def decode_chat(body: bytes) -> GenerationRequest:
    """Return the request of a body."""
    parsed, unread = decode(body, ChatRequest)
    client_variables = dict(parsed.chat_template_kwargs or {})
    if parsed.enable_thinking is not None:
        client_variables.setdefault("enable_thinking", parsed.enable_thinking)
    variables, reasoning_warnings = reasoning_options(
        client_variables,
        effort=parsed.reasoning_effort,
        where="reasoning_effort",
        reasoning=parsed.reasoning,
        thinking=parsed.thinking,
    )
    if parsed.add_generation_prompt is not None:
        variables["add_generation_prompt"] = parsed.add_generation_prompt
    declared = chat_tools(parsed.tools)
    arguments = tool_arguments(declared, parsed.tool_choice)
    if parsed.top_logprobs and not parsed.logprobs:
        raise Problem("top_logprobs needs logprobs: true", param="top_logprobs")
    arguments |= openai_arguments(parsed, unread)
    message_warnings: list[str] = []
    messages = parse_messages(parsed.messages, message_warnings)
    arguments["warnings"] += (*reasoning_warnings, *declared.warnings, *message_warnings)
    budget = positive_budget((parsed.thinking or {}).get("budget_tokens"))
    if budget is None:
        budget = positive_budget((parsed.reasoning or {}).get("max_tokens"))
    if budget is not None:
        arguments["thinking_budget"] = budget
    if parsed.max_completion_tokens is not None:
        arguments["max_tokens"] = parsed.max_completion_tokens
    logprobs = None
    if parsed.logprobs:
        logprobs = parsed.top_logprobs or 0
    return GenerationRequest(
        api="chat",
        messages=messages,
        parallel_tool_calls=parsed.parallel_tool_calls is not False,
        template_kwargs=variables,
        continue_final_message=bool(parsed.continue_final_message),
        logprobs=logprobs,
        **arguments,
    )


class ChatWriter(OpenAIWriter):
    """Writes responses and chunks of chat completions."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    field = "delta"

    def __init__(self, generation: Generation):
        super().__init__(generation)
        self._freeform: dict[tuple[int, int], FreeformInput] = {}  # by index of choice and call

    def start(self) -> bytes:
        """Return a chunk with the role for every choice."""
        self.kind = "chat.completion.chunk"
        delta = {"role": "assistant", "content": ""}
        prompt_ids = self._prompt_ids()
        return b"".join(
            self._chunk(reply, delta, fields=prompt_ids) for reply in self.generation.replies
        )

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """Return a chunk per event, and the last one once `reply.result` is set."""
        out = b""
        for event in events:
            match event:
                case Content(text):
                    out += self._chunk(reply, {"content": text})
                case Thinking(text):
                    out += self._chunk(reply, {"reasoning_content": text, "reasoning": text})
                case ToolCallStart(index, name):
                    call = {"index": index} | self._call(reply.calls[index].id, name, "")
                    out += self._chunk(reply, {"tool_calls": [call]})
                case ToolCallDelta(index, text):
                    out += self._call_chunk(reply, index, text)
                case ToolCallEnd(index):
                    out += self._call_chunk(reply, index, "", ended=True)
        if reply.result is not None:
            end = writer.choice_statistics(reply, self.request)
            out += self._chunk(reply, {}, end, self._final_fields())
        return out

    def _call_chunk(self, reply: Reply, index: int, text: str, *, ended: bool = False) -> bytes:
        """Return a chunk with more of a call, if there is more."""
        call = reply.calls[index]
        delta: dict[str, Any] = {"index": index}
        if call.name in self.request.client_tools:
            freeform = self._freeform.setdefault((reply.index, index), FreeformInput())
            text = freeform.finish(call.arguments) if ended else freeform.push(text)
            delta["custom"] = {"input": text}
        else:
            delta["function"] = {"arguments": text}
        return self._chunk(reply, {"tool_calls": [delta]}) if text else b""

    def _call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        """Return a call as the client declared its tool; undeclared ones are functions."""
        if name in self.request.client_tools:
            custom = {"name": name, "input": freeform_input(arguments)}
            return {"id": call_id, "type": "custom", "custom": custom}
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _choice(self, reply: Reply) -> dict[str, Any]:
        calls = [self._call(call.id, call.name, call.arguments) for call in reply.done_calls]
        content = reply.content
        if calls and not content:
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
            message["reasoning"] = reply.reasoning
            detail = {"type": "reasoning.text", "text": reply.reasoning, "index": 0}
            message["reasoning_details"] = [detail]
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {"index": reply.index, "message": message}
        choice["logprobs"] = self._logprobs(reply.logprobs)
        choice |= self._new_rounds(reply)
        return choice | writer.choice_statistics(reply, self.request)

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        return (
            super().to_json()
            | self._prompt_ids()
            | self._prompt_logprobs(self.generation.replies[0])
        )

    def _prompt_ids(self) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.prompts[0].ids}


class CompletionRequest(OpenAIFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


def decode_completion(body: bytes) -> GenerationRequest:
    """Return the request of a body."""
    parsed, unread = decode(body, CompletionRequest)
    prompts: list[Any] = [parsed.prompt]
    if isinstance(parsed.prompt, list):
        are_ids = [isinstance(entry, int) for entry in parsed.prompt]
        if not all(are_ids):
            prompts = list(parsed.prompt)
            if any(are_ids):
                raise Problem("prompt mixes token ids with prompts", param="prompt")
    if parsed.best_of not in (None, 1, parsed.n):
        raise Problem("best_of is not supported; use n", param="best_of")
    if parsed.echo and parsed.logprobs is not None and parsed.stream:
        raise Problem(
            "no stream has log probabilities of the prompt; drop one of echo, logprobs and stream",
            param="echo",
        )
    if len(prompts) > MOST_CHOICES:
        raise Problem(f"{len(prompts)} prompts; at most {MOST_CHOICES}", param="prompt")
    return GenerationRequest(
        api="completions",
        prompts=prompts,
        suffix=parsed.suffix or "",
        echo=bool(parsed.echo),
        logprobs=parsed.logprobs,
        **openai_arguments(parsed, unread),
    )


class CompletionWriter(OpenAIWriter):
    """Writes responses and chunks of completions."""

    prefix = "cmpl-"
    kind = "text_completion"
    field = "text"

    def start(self) -> bytes:
        """Return a chunk with the prompt of every choice, if the request asks to echo it."""
        if not self.request.echo:
            return b""
        replies = self.generation.replies
        return b"".join(self._chunk(reply, self._echo(reply)) for reply in replies)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        """Return a chunk with the new text, if there is some or the output ended."""
        text = "".join(event.text for event in events if isinstance(event, Content))
        if reply.result is not None:
            return self._chunk(reply, text, self._end(reply), self._final_fields())
        return self._chunk(reply, text) if text else b""

    def _end(self, reply: Reply) -> dict[str, Any]:
        end = writer.choice_statistics(reply, self.request)
        if self.request.return_token_ids:
            prompt = self.generation.prompts[reply.index // self.request.n]
            end["prompt_token_ids"] = prompt.ids
        return end

    def _choice(self, reply: Reply) -> dict[str, Any]:
        text = reply.content
        entries = list(reply.logprobs)
        if self.request.echo:
            text = self._echo(reply) + text
            if reply.result is not None:
                entries = [*(reply.result.prompt_logprobs or ()), *entries]
        choice = {"index": reply.index, "text": text, "logprobs": self._logprobs(entries)}
        choice |= self._new_rounds(reply)
        return choice | self._end(reply) | self._prompt_logprobs(reply)

    def _echo(self, reply: Reply) -> str:
        """Return the text of a reply's prompt."""
        prompt = self.request.prompts[reply.index // self.request.n]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.generation.model.engine.tokenizer
        return tokenizer.decode(prompt) if tokenizer else ""
