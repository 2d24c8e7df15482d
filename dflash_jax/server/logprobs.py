"""Log probabilities in the formats of chat completions, completions and vLLM.

Each token with its alternatives is encoded at once, as `msgspec.Raw`: a tree of objects of a large
response would hold the interpreter lock for a second while it is encoded, freed, or searched by the
garbage collector.
"""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.tokenizer import TextStream, Tokenizer


def chat_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of chat completions; entries of `content` are encoded.

    Args:
      as_ids: write tokens as vLLM's "token_id:NUMBER".
    """

    @functools.cache
    def description(token: int) -> tuple[str, list[int] | None]:
        known = tokenizer.raw_bytes(token) if tokenizer else None
        text = _id_text(token) if as_ids else _text(token, tokenizer)
        return text, None if known is None else list(known)

    def described(token: int, value: float | None) -> dict[str, Any]:
        text, data = description(token)
        return {"token": text, "logprob": value, "bytes": data}

    def content(entry: TokenLogprob) -> dict[str, Any]:
        top = [described(token, value) for token, value in entry.top]
        return described(entry.token_id, entry.logprob) | {"top_logprobs": top}

    return {"content": [_encoded(content(entry)) for entry in entries], "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob],
    tokenizer: Tokenizer | None,
    before: TextStream | None = None,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return `choices[].logprobs` of completions. `top_logprobs` include the sampled token.

    The entries of `top_logprobs` are encoded. They and the log probability are null for
    tokens without one, such as the first token of a prompt.

    Args:
      before: text of the tokens before `entries`; it is extended by them. A token's offset is the
        number of complete characters before it.
      as_ids: write tokens as vLLM's "token_id:NUMBER".
    """

    @functools.cache
    def text(token: int) -> str:
        return _id_text(token) if as_ids else _byte_text(token, tokenizer)

    before = before or (tokenizer.stream() if tokenizer else None)
    offsets, top = [], []
    for entry in entries:
        offsets.append(len(before.text) if before else 0)
        if before:
            before.push([entry.token_id])
        own = () if entry.logprob is None else ((entry.token_id, entry.logprob),)
        top.append(_encoded({text(i): value for i, value in (*entry.top, *own)} or None))
    return {
        "tokens": [text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer | None
) -> list[msgspec.Raw]:
    """Return vLLM's `prompt_logprobs`: for each token, log probabilities by token id, encoded.

    Each entry includes the prompt token itself, whose rank is null unless it is among the top
    tokens. Tokens without a log probability, such as the first, get null.

    Args:
      num_top: number of top tokens to include.
    """
    text = functools.cache(functools.partial(_text, tokenizer=tokenizer))

    def ranks(entry: TokenLogprob) -> dict[str, Any] | None:
        if entry.logprob is None:
            return None
        ranked = [(token, value, at + 1) for at, (token, value) in enumerate(entry.top)]
        own = (entry.token_id, entry.logprob, None)
        known = {token: (value, rank) for token, value, rank in (own, *ranked)}
        wanted = (entry.token_id, *(token for token, _, _ in ranked[:num_top]))
        return {
            str(token): {
                "logprob": known[token][0],
                "rank": known[token][1],
                "decoded_token": text(token),
            }
            for token in wanted
        }

    return [_encoded(ranks(entry)) for entry in entries]


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _id_text(token: int) -> str:
    return f"token_id:{token}"


def _byte_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a token's text; a part of a character is written as bytes, as in OpenAI's API."""
    text = _text(token, tokenizer)
    data = tokenizer.raw_bytes(token) if tokenizer and "\ufffd" in text else None
    return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    return tokenizer.raw([token])
