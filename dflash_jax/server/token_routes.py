"""Routes that count, encode and decode tokens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.access_log import AccessRecord
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.background import in_thread, read_body
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.http_responses import json_response
from dflash_jax.server.middleware import Handler, Middleware
from dflash_jax.server.prompt import prepare
from dflash_jax.server.protocol import GenerationRequest, Problem, decode
from dflash_jax.server.served_models import ServedModel, ServedModels
from dflash_jax.server.tools import chat_tools, tool_arguments
from dflash_jax.server.unsupported import check_unread
from dflash_jax.tokenizer import Tokenizer

# Returns the function that decodes the body of a request.
Reader = Callable[[Request], Callable[[bytes], GenerationRequest]]


class TokenizeRequest(msgspec.Struct):
    """Body of POST /tokenize, with the fields of llama.cpp (`content`) and vLLM (`prompt`)."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None  # llama.cpp's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None  # vLLM's
    with_pieces: bool | None = None  # llama.cpp's


class DetokenizeRequest(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class TokenRoutes:
    """Handlers of the routes that count, encode and decode tokens."""

    def __init__(self, models: ServedModels, middleware: Middleware):
        self._models = models
        self._middleware = middleware

    @property
    def posts(self) -> dict[str, Handler]:
        """Return the handlers of POST by path."""
        return {
            "/v1/messages/count_tokens": self.token_counter(
                lambda _: functools.partial(decode_messages, counting=True)
            ),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    def token_counter(self, read: Reader, *, stored: bool = False, **fields: Any) -> Handler:
        """Return a handler that counts the prompt tokens of a request.

        Args:
          read: returns a function that decodes the body.
          stored: the body may refer to stored items.
          fields: fields of the response in addition to `input_tokens`.
        """

        async def handler(raw_request: Request) -> Response:
            body = await self._middleware.body(raw_request)
            request = await read_body(read(raw_request), body, stored=stored)
            [prompt] = await prepare(self._model(raw_request, request.model), request)
            return json_response(fields | {"input_tokens": len(prompt.ids)})

        return handler

    def _model(self, raw_request: Request, name: str | None) -> ServedModel:
        """Return the model that a request names, and note it for the log."""
        model = self._models.named(name)
        AccessRecord.of(raw_request.scope).model = model.name
        return model

    async def _tokenize(self, raw_request: Request) -> Response:
        read = functools.partial(decode, kind=TokenizeRequest)
        parsed, unread = await read_body(read, await self._middleware.body(raw_request))
        warnings = check_unread(unread)
        model = self._model(raw_request, parsed.model)
        tokenizer = model.engine.tokenizer
        if tokenizer is None:
            raise Problem("this model ships no tokenizer")
        max_length = model.engine.plan.max_length
        if parsed.messages is not None:
            request = await in_thread(_conversation_request, parsed, long=True)
            [prompt] = await prepare(model, request)
            ids = prompt.ids
        else:
            ids = await in_thread(
                _text_ids, parsed, tokenizer, max_length, long=True, param="content"
            )
        return await in_thread(
            _tokens_response, parsed, tokenizer, ids, max_length, warnings, long=True
        )

    async def _detokenize(self, raw_request: Request) -> Response:
        read = functools.partial(decode, kind=DetokenizeRequest)
        parsed, _ = await read_body(read, await self._middleware.body(raw_request))
        engine = self._model(raw_request, parsed.model).engine
        if engine.tokenizer is None:
            raise Problem("this model ships no tokenizer")
        max_length = engine.plan.max_length
        if len(parsed.tokens) > max_length:
            raise Problem(
                f"{len(parsed.tokens)} tokens were given; at most {max_length}, the model's maximum"
                " context length: send them in parts",
                param="tokens",
            )
        vocab_size = engine.graph.config.vocab_size
        unknown = [token for token in parsed.tokens if not 0 <= token < vocab_size]
        if unknown:
            raise Problem(f"tokens {unknown[:5]} are not from 0 to {vocab_size - 1}")
        text = await in_thread(engine.tokenizer.raw, parsed.tokens, long=True)
        return json_response({"content": text, "prompt": text})


def _conversation_request(parsed: TokenizeRequest) -> GenerationRequest:
    """Return the request of chat completions whose prompt is to be tokenized."""
    template = dict(parsed.chat_template_kwargs or {})
    if parsed.add_generation_prompt is not None:
        template["add_generation_prompt"] = parsed.add_generation_prompt
    return GenerationRequest(
        **tool_arguments(chat_tools(parsed.tools), None),
        api="chat",
        model=None,
        messages=parse_messages(parsed.messages or ()),
        parse_special=parsed.parse_special,
        template_kwargs=template,
        continue_final_message=bool(parsed.continue_final_message),
    )


def _text_ids(parsed: TokenizeRequest, tokenizer: Tokenizer, max_length: int) -> list[int]:
    """Return the token ids of a text; refuses one that certainly exceeds the context length."""
    text = parsed.content if parsed.content is not None else parsed.prompt
    if text is None:
        raise Problem("give content, prompt or messages", param="content")
    specials = parsed.content is None  # as llama.cpp, which has `content`, and vLLM do
    if parsed.add_special is not None:
        specials = parsed.add_special
    elif parsed.add_special_tokens is not None:
        specials = parsed.add_special_tokens
    if parsed.parse_special is False:
        text = tokenizer.marked(text)
    tokenizer.check_fits(text, max_length)
    return tokenizer.encode(text, specials=specials)


def _tokens_response(
    parsed: TokenizeRequest,
    tokenizer: Tokenizer,
    ids: list[int],
    max_length: int,
    warnings: Sequence[str],
) -> Response:
    if (parsed.with_pieces or parsed.return_token_strs) and len(ids) > max_length:
        raise Problem(
            f"the text has {len(ids)} tokens; pieces are given of at most {max_length}, the"
            " model's maximum context length: leave out with_pieces and return_token_strs",
            param="with_pieces" if parsed.with_pieces else "return_token_strs",
        )
    fields: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_length}
    if parsed.with_pieces:
        fields["tokens"] = [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]
    if parsed.return_token_strs:
        fields["token_strs"] = [tokenizer.core.id_to_token(token) for token in ids]
    if warnings:
        fields["warnings"] = list(warnings)
    return json_response(fields)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not valid UTF-8."""
    text = tokenizer.raw([token])
    data = tokenizer.raw_bytes(token)
    if data is not None and "\ufffd" in text:
        return list(data)
    return text
