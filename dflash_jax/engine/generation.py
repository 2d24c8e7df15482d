"""Ways to use an engine: wait for results, iterate over pieces, or give the messages of a chat."""

import abc
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from dflash_jax.compiler.keys import Variant
from dflash_jax.engine import vocabulary
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.handle import AsyncDriver, AsyncStream, RequestHandle, Stream
from dflash_jax.engine.request import CancelCell, Prompt, Request
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingOptions, SamplingParams
from dflash_jax.engine.scheduler import variants_of
from dflash_jax.engine.sequence import Sequence as RunningSequence
from dflash_jax.errors import RequestError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import chat_tools

Messages = str | Sequence[dict[str, Any]]


class RequestMethods(abc.ABC):
    """The methods of an engine that generate; each submits requests and runs turns."""

    core: EngineCore
    tokenizer: Tokenizer | None
    _driver: AsyncDriver

    @abc.abstractmethod
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RequestHandle:
        """Queue a request."""

    @abc.abstractmethod
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: CancelCell | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Generate piece by piece."""

    @abc.abstractmethod
    def advance(self) -> None:
        """Run one turn."""

    @abc.abstractmethod
    def cancel(self, handle: RequestHandle) -> None:
        """End a request."""

    @abc.abstractmethod
    def compile(self, variants: Iterable[Variant]) -> float:
        """Compile missing programs of variants; return the seconds."""

    @abc.abstractmethod
    def _requests(self, prompt: Prompt, params: SamplingParams, n: int) -> list[Request]: ...

    @abc.abstractmethod
    def _sequence(self, request: Request, cancel: CancelCell | None) -> RunningSequence: ...

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
        sequences: list[RunningSequence] = []
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
