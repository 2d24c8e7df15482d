"""Replies to a request for a raw output, for the tests of what the APIs say. Without an engine."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, cast

from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.engine.result import Piece, Result, Stats, TokenLogprob
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.generation import Generation
from dflash_jax.server.prompt import EncodedPrompt
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.server.reply import Reply
from dflash_jax.server.served_models import ServerConfig
from dflash_jax.server.tools import parse_tools
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
TURN = f"<think>\nLook first.\n</think>\n\nLet me look:\n{CALL}<|im_end|>"


def asked(api: str = "chat", **changes: Any) -> GenerationRequest:
    tools, declared, choice = parse_tools(TOOLS, None)
    messages = parse_messages([{"role": "user", "content": "Read a.txt"}])
    base = GenerationRequest(
        api=api,
        model=None,
        messages=messages,
        tools=tools,
        declared_tools=declared,
        tool_choice=choice,
    )
    return dataclasses.replace(base, **changes)


def pieces(
    tokenizer: Tokenizer, ids: list[int], width: int, *, logprobs: bool = False
) -> list[Piece]:
    """Return the pieces of an engine that emits `width` tokens at a time."""
    text = Detokenizer(tokenizer)
    made = []
    for i in range(0, len(ids), width):
        part = ids[i : i + width]
        found = tuple(TokenLogprob(token, -1.0, ()) for token in part) if logprobs else ()
        made.append(Piece(tuple(part), text.push(part), found))
    rest = text.finish()
    return [*made, Piece((), rest)] if rest else made


def replied(
    tokenizer: Tokenizer,
    text: str,
    request: GenerationRequest,
    *,
    end: str = "stop",
    width: int = 3,
) -> tuple[Reply, list[list]]:
    """Return the reply to a request for an output with this raw text, and its events by piece."""
    ids = tokenizer.encode(text, specials=False)
    reply = Reply(0, request, tokenizer, SYNTAXES["hermes"])
    events = [reply.push(piece) for piece in pieces(tokenizer, ids, width)]
    stats = Stats(prompt_tokens=5, output_tokens=len(ids))
    events.append(reply.finish(Result(ids, text, end, stats)))
    return reply, events


def generation(reply: Reply, request: GenerationRequest) -> Generation:
    model = SimpleNamespace(name="tiny", defaults=ServerConfig(), fingerprint="fp_0")
    model.engine = SimpleNamespace(tokenizer=None)
    prompts = [EncodedPrompt([1] * 5)]
    made = SimpleNamespace(model=model, request=request, replies=[reply], prompts=prompts, cached=0)
    return cast(Generation, made)


def streamed(writer: Any, reply: Reply, events: list[list]) -> list[dict]:
    result, reply.result = reply.result, None
    raw = writer.start()
    for i, new in enumerate(events):
        if i == len(events) - 1:
            reply.result = result
        raw += writer.events(reply, new)
    raw += writer.close()
    lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
