"""OpenAI's completions and chat completions: request decoding, responses and stream chunks."""

import abc
from typing import Any

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.server import writer
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import (
    OpenAIFields,
    openai_arguments,
    positive_budget,
    reasoning_options,
)
from dflash_jax.server.generation import Generation
from dflash_jax.server.protocol import MOST_CHOICES, GenerationRequest, Problem, decode
from dflash_jax.server.reply import Reply
from dflash_jax.server.tools import FreeformInput, chat_tools, freeform_input, tool_arguments
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
      kind: the `object` field.
      field: of a choice, with its new output in a chunk.
    """

    kind = field = ""

    def error(self, problem: Problem) -> bytes:
        """Return the error object and the end of the stream."""
        return sse_data(problem.to_json()) + DONE

    def close(self) -> bytes:
        """Return the usage chunk, if requested, and the end of the stream."""
        tail = sse_data(self._object([], **self._usage())) if self.request.include_usage else b""
        return tail + DONE

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        choices = [self._choice(reply) for reply in self.generation.replies]
        return self._object(choices, **self._usage())

    @abc.abstractmethod
    def _choice(self, reply: Reply) -> dict[str, Any]:
        """Return a finished output as an entry of `choices`."""

    def _chunk(
        self, reply: Reply, new: Any, choice: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        """Return a chunk with more of one choice."""
        entry: dict[str, Any] = {"index": reply.index, self.field: new, "finish_reason": None}
        entry["logprobs"] = self._new_logprobs(reply)
        entry |= self._new_rounds(reply) | (choice or {})
        if self.request.continuous_usage_stats:
            more = {"usage": writer.token_usage(self.generation)} | more
        return sse_data(self._object([entry], **more))

    def _new_rounds(self, reply: Reply) -> dict[str, Any]:
        """Return the rounds that were not sent yet as a field of a choice, if requested."""
        if not self.request.return_token_sources:
            return {}
        return {"rounds": list(map(writer.encoded_round, reply.take_rounds()))}

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "object": self.kind,
            "id": self.id,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.generation.model.fingerprint,
            "choices": choices,
            **more,
        }

    def _usage(self) -> dict[str, Any]:
        usage = writer.token_usage(self.generation)
        return {"usage": usage} | writer.requested_statistics(self.generation, self.id)

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
            return writer.chat_logprobs(entries, tokenizer, as_ids=as_ids)
        return writer.completion_logprobs(entries, tokenizer, before, as_ids=as_ids)

    def _new_logprobs(self, reply: Reply) -> dict[str, Any] | None:
        entries, reply.reported = reply.logprobs[reply.reported :], len(reply.logprobs)
        return self._logprobs(entries, reply.logprob_text)

    def _prompt_logprobs(self, reply: Reply) -> dict[str, Any]:
        most = self.request.prompt_logprobs
        logprobs = None if reply.result is None else reply.result.prompt_logprobs
        if most is None or logprobs is None:
            return {}
        tokenizer = self.generation.model.engine.tokenizer
        return {"prompt_logprobs": writer.prompt_logprobs(logprobs, most, tokenizer)}

    def _final_fields(self) -> dict[str, Any]:
        """Return additional fields of an output's last chunk."""
        if not self.request.stream or self.request.include_usage:
            return {}
        if len(self.generation.replies) == 1:
            return writer.requested_statistics(self.generation, self.id)
        last = all(reply.result for reply in self.generation.replies)
        texts = writer.warnings(self.generation) if last else []
        return {"warnings": texts} if texts else {}


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
    reasoning, thinking = parsed.reasoning, parsed.thinking
    given = dict(parsed.chat_template_kwargs or {})
    if parsed.enable_thinking is not None:
        given.setdefault("enable_thinking", parsed.enable_thinking)
    template, warnings = reasoning_options(
        given,
        effort=parsed.reasoning_effort,
        where="reasoning_effort",
        reasoning=reasoning,
        thinking=thinking,
    )
    if parsed.add_generation_prompt is not None:
        template["add_generation_prompt"] = parsed.add_generation_prompt
    given_tools = chat_tools(parsed.tools)
    tools = tool_arguments(given_tools, parsed.tool_choice)
    if parsed.top_logprobs and not parsed.logprobs:
        raise Problem("top_logprobs needs logprobs: true", param="top_logprobs")
    common = openai_arguments(parsed, unread)
    more = list(given_tools.warnings)
    messages = parse_messages(parsed.messages, more)
    common["warnings"] += (*warnings, *more)
    budget = positive_budget((thinking or {}).get("budget_tokens"))
    budget = budget or positive_budget((reasoning or {}).get("max_tokens"))
    common["thinking_budget"] = budget or common["thinking_budget"]
    if parsed.max_completion_tokens is not None:
        common["max_tokens"] = parsed.max_completion_tokens
    return GenerationRequest(
        api="chat",
        messages=messages,
        parallel_tool_calls=parsed.parallel_tool_calls is not False,
        template_kwargs=template,
        continue_final_message=bool(parsed.continue_final_message),
        logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else None,
        **tools | common,
    )


class ChatWriter(OpenAIWriter):
    """Writes responses and chunks of chat completions."""

    prefix, kind, field = "chatcmpl-", "chat.completion", "delta"

    def __init__(self, generation: Generation):
        super().__init__(generation)
        self._freeform: dict[tuple[int, int], FreeformInput] = {}  # by choice and call

    def start(self) -> bytes:
        """Return a chunk with the role for every choice."""
        self.kind = "chat.completion.chunk"
        first = {"role": "assistant", "content": ""}
        more = self._prompt_ids()
        return b"".join(self._chunk(reply, first, **more) for reply in self.generation.replies)

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
            choice = writer.choice_statistics(reply, self.request, self.id)
            out += self._chunk(reply, {}, choice, **self._final_fields())
        return out

    def _call_chunk(self, reply: Reply, index: int, text: str, *, ended: bool = False) -> bytes:
        """Return a chunk with more of a call, if there is more."""
        call, delta = reply.calls[index], {"function": {"arguments": text}}
        if call.name in self.request.client_tools:
            freeform = self._freeform.setdefault((reply.index, index), FreeformInput())
            text = freeform.finish(call.arguments) if ended else freeform.push(text)
            delta = {"custom": {"input": text}}
        return self._chunk(reply, {"tool_calls": [{"index": index} | delta]}) if text else b""

    def _call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        """Return a call as the client declared its tool; undeclared ones are functions."""
        if name in self.request.client_tools:
            custom = {"name": name, "input": freeform_input(arguments)}
            return {"id": call_id, "type": "custom", "custom": custom}
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _choice(self, reply: Reply) -> dict[str, Any]:
        calls = [self._call(call.id, call.name, call.arguments) for call in reply.done_calls]
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = reply.content if reply.content or not calls else None
        if reply.reasoning:
            message["reasoning_content"] = message["reasoning"] = reply.reasoning
            detail = {"type": "reasoning.text", "text": reply.reasoning, "index": 0}
            message["reasoning_details"] = [detail]
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {"index": reply.index, "message": message}
        choice["logprobs"] = self._logprobs(reply.logprobs)
        choice |= self._new_rounds(reply)
        return choice | writer.choice_statistics(reply, self.request, self.id)

    def to_json(self) -> dict[str, Any]:
        """Return the response object."""
        return (
            super().to_json()
            | self._prompt_ids()
            | self._prompt_logprobs(self.generation.replies[0])
        )

    def _prompt_ids(self) -> dict[str, Any]:
        fields = {"prompt_token_ids": self.generation.prompts[0].ids}
        return fields if self.request.return_token_ids else {}


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
    if isinstance(parsed.prompt, list) and not all(isinstance(p, int) for p in parsed.prompt):
        prompts = list(parsed.prompt)
        if any(isinstance(p, int) for p in prompts):
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

    prefix, kind, field = "cmpl-", "text_completion", "text"

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
            return self._chunk(reply, text, self._end(reply), **self._final_fields())
        return self._chunk(reply, text) if text else b""

    def _end(self, reply: Reply) -> dict[str, Any]:
        end = writer.choice_statistics(reply, self.request, self.id)
        prompt = self.generation.prompts[reply.index // self.request.n]
        return end | ({"prompt_token_ids": prompt.ids} if self.request.return_token_ids else {})

    def _choice(self, reply: Reply) -> dict[str, Any]:
        text = (self._echo(reply) if self.request.echo else "") + reply.content
        prompt = reply.result.prompt_logprobs if reply.result and self.request.echo else None
        logprobs = self._logprobs([*(prompt or ()), *reply.logprobs])
        base = {"index": reply.index, "text": text, "logprobs": logprobs}
        base |= self._new_rounds(reply)
        return base | self._end(reply) | self._prompt_logprobs(reply)

    def _echo(self, reply: Reply) -> str:
        given = self.request.prompts[reply.index // self.request.n]
        if isinstance(given, str):
            return given
        tokenizer = self.generation.model.engine.tokenizer
        return tokenizer.decode(given) if tokenizer else ""
