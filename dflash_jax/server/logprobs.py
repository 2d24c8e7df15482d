"""Log probabilities in the formats of chat completions, completions and vLLM.

Each token with its alternatives is encoded at once, as `msgspec.Raw`: a tree of objects of a
large response would hold the interpreter lock for a second while it is encoded, freed, or
searched by the garbage collector.
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
    def text_and_bytes(token: int) -> tuple[str, list[int] | None]:
        text = _id_text(token) if as_ids else _text(token, tokenizer)
        data = tokenizer.raw_bytes(token) if tokenizer else None
        return text, None if data is None else list(data)

    def alternative(token: int, logprob: float | None) -> dict[str, Any]:
        text, data = text_and_bytes(token)
        return {"token": text, "logprob": logprob, "bytes": data}

    content = []
    for entry in entries:
        fields = alternative(entry.token_id, entry.logprob)
        fields["top_logprobs"] = [alternative(token, logprob) for token, logprob in entry.top]
        content.append(encoded(fields))
    return {"content": content, "refusal": None}


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

    if before is None and tokenizer is not None:
        before = tokenizer.stream()
    offsets = []
    top = []
    for entry in entries:
        offset = 0
        if before is not None:
            offset = len(before.text)
            before.push([entry.token_id])
        offsets.append(offset)
        alternatives = {text(token): logprob for token, logprob in entry.top}
        if entry.logprob is not None:
            alternatives[text(entry.token_id)] = entry.logprob
        top.append(encoded(alternatives or None))
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

    def alternatives(entry: TokenLogprob) -> dict[str, Any] | None:
        if entry.logprob is None:
            return None
        described: dict[str, dict[str, Any]] = {}
        ranked = enumerate(entry.top, 1)
        own = (None, (entry.token_id, entry.logprob))
        for rank, (token, logprob) in (own, *ranked):
            # A rank beyond `num_top` is known, too, if it is that of the prompt token itself.
            if rank is None or rank <= num_top or token == entry.token_id:
                fields = {"logprob": logprob, "rank": rank, "decoded_token": text(token)}
                described[str(token)] = fields
        return described

    return [encoded(alternatives(entry)) for entry in entries]


def encoded(value: Any) -> msgspec.Raw:
    """Return a value as JSON that enters a response as it is."""
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
