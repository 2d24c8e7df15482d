"""/v1/completions: requests read into an `Ask`, answers and stream chunks."""

from typing import Any

from dflash_jax.server import statistics
from dflash_jax.server.fields import OpenAIFields, openai_arguments
from dflash_jax.server.protocol import MOST_CHOICES, GenerationRequest, Problem, decode
from dflash_jax.server.reply import Reply
from dflash_jax.server.writer import OpenAIWriter
from dflash_jax.tool_parsers.events import Content, Event


class CompletionRequest(OpenAIFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


def decode_completion(body: bytes) -> GenerationRequest:
    """POST /v1/completions."""
    found, unknown = decode(body, CompletionRequest)
    prompts: list[Any] = [found.prompt]
    if isinstance(found.prompt, list) and not all(isinstance(p, int) for p in found.prompt):
        prompts = list(found.prompt)
        if any(isinstance(p, int) for p in prompts):
            raise Problem(400, "prompt mixes token ids with prompts", param="prompt")
    if found.suffix:
        raise Problem(400, "suffix is not supported; put it into the prompt", param="suffix")
    if found.best_of not in (None, 1, found.n):
        raise Problem(400, "best_of is not supported; use n", param="best_of")
    if found.echo and found.logprobs is not None and found.stream:
        raise Problem(
            400, "no stream has log probabilities of the prompt; drop one of echo, logprobs and"
            " stream", param="echo",
        )  # fmt: skip
    if len(prompts) > MOST_CHOICES:
        raise Problem(400, f"{len(prompts)} prompts; at most {MOST_CHOICES}", param="prompt")
    return GenerationRequest(
        api="completions",
        prompts=prompts,
        echo=bool(found.echo),
        logprobs=found.logprobs,
        **openai_arguments(found, unknown),
    )


class CompletionWriter(OpenAIWriter):
    """/v1/completions."""

    prefix, kind = "cmpl-", "text_completion"

    def start(self) -> bytes:
        if not self.request.echo:
            return b""
        replies = self.generation.replies
        return b"".join(self._chunk(reply, self._echo(reply)) for reply in replies)

    def events(self, reply: Reply, events: list[Event]) -> bytes:
        text = "".join(event.text for event in events if isinstance(event, Content))
        if reply.result is not None:
            return self._chunk(reply, text, self._end(reply), **self._final_fields(reply))
        return self._chunk(reply, text) if text else b""

    def _chunk(
        self, reply: Reply, text: str, choice: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        base: dict[str, Any] = {"index": reply.index, "text": text, "finish_reason": None}
        base["logprobs"] = self._new_logprobs(reply)
        return self._chunk_event(base | (choice or {}), more)

    def _end(self, reply: Reply) -> dict[str, Any]:
        end = statistics.choice_statistics(reply, self.request, self.id)
        prompt = self.generation.prompts[reply.index // self.request.n]
        return end | ({"prompt_token_ids": prompt.ids} if self.request.return_token_ids else {})

    def _choice(self, reply: Reply) -> dict[str, Any]:
        text = (self._echo(reply) if self.request.echo else "") + reply.content
        prompt = reply.result.prompt_logprobs if reply.result and self.request.echo else None
        logprobs = self._logprobs([*(prompt or ()), *reply.logprobs])
        base = {"index": reply.index, "text": text, "logprobs": logprobs}
        return base | self._end(reply) | self._prompt_logprobs(reply)

    def _echo(self, reply: Reply) -> str:
        given = self.request.prompts[reply.index // self.request.n]
        if isinstance(given, str):
            return given
        tokenizer = self.generation.model.engine.tokenizer
        return tokenizer.decode(given) if tokenizer else ""
