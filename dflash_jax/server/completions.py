"""OpenAI's /v1/completions: request decoding, responses and stream chunks."""

from typing import Any

from dflash_jax.server import writer
from dflash_jax.server.fields import OpenAIFields, openai_arguments
from dflash_jax.server.protocol import MOST_CHOICES, GenerationRequest, Problem, decode
from dflash_jax.server.reply import Reply
from dflash_jax.server.writer import OpenAIWriter
from dflash_jax.tool_parsers.calls import Content, Event


class CompletionRequest(OpenAIFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


def decode_completion(body: bytes) -> GenerationRequest:
    """Return the request of a body.

    Raises:
      Problem: the body is invalid, or asks for something unsupported.
    """
    parsed, unknown = decode(body, CompletionRequest)
    prompts: list[Any] = [parsed.prompt]
    if isinstance(parsed.prompt, list) and not all(isinstance(p, int) for p in parsed.prompt):
        prompts = list(parsed.prompt)
        if any(isinstance(p, int) for p in prompts):
            raise Problem(400, "prompt mixes token ids with prompts", param="prompt")
    if parsed.best_of not in (None, 1, parsed.n):
        raise Problem(400, "best_of is not supported; use n", param="best_of")
    if parsed.echo and parsed.logprobs is not None and parsed.stream:
        raise Problem(
            400, "no stream has log probabilities of the prompt; drop one of echo, logprobs and"
            " stream", param="echo",
        )  # fmt: skip
    if len(prompts) > MOST_CHOICES:
        raise Problem(400, f"{len(prompts)} prompts; at most {MOST_CHOICES}", param="prompt")
    return GenerationRequest(
        api="completions",
        prompts=prompts,
        suffix=parsed.suffix or "",
        echo=bool(parsed.echo),
        logprobs=parsed.logprobs,
        **openai_arguments(parsed, unknown),
    )


class CompletionWriter(OpenAIWriter):
    """Writes responses and chunks of completions."""

    prefix, kind = "cmpl-", "text_completion"

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
            return self._chunk(reply, text, self._end(reply), **self._final_fields(reply))
        return self._chunk(reply, text) if text else b""

    def _chunk(
        self, reply: Reply, text: str, choice: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        base: dict[str, Any] = {"index": reply.index, "text": text, "finish_reason": None}
        base["logprobs"] = self._new_logprobs(reply)
        base |= self._new_rounds(reply)
        return self._chunk_event(base | (choice or {}), more)

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
