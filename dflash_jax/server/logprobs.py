"""Log-probabilities of output tokens in the shapes of chat completions and of completions."""

from collections.abc import Sequence
from typing import Any

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.tokenizer import Tokenizer


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions, for `TokenLogprob`s in order."""
    content = []
    for entry in entries:
        top = [_entry(token, value, tokenizer) for token, value in entry.top]
        content.append(_entry(entry.token_id, entry.logprob, tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None, start: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of completions, for a text that begins at `start` of the output."""
    tokens = [_text(entry.token_id, tokenizer) for entry in entries]
    offsets = [start]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_text(i, tokenizer): v for i, v in entry.top} for entry in entries],
        "text_offset": offsets[:-1],
    }


def _entry(token: int, value: float | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    known = tokenizer.raw_bytes(token) if tokenizer else None
    said = None if known is None else list(known)
    return {"token": _text(token, tokenizer), "logprob": value, "bytes": said}


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    return tokenizer.raw([token])
