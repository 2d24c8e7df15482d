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
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """`choices[].logprobs` of completions."""
    tokens = [_text(entry.token_id, tokenizer) for entry in entries]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_text(i, tokenizer): v for i, v in entry.top} for entry in entries],
        "text_offset": offsets[:-1],
    }


def _entry(token: int, value: float | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = _text(token, tokenizer)
    whole = "\ufffd" not in text  # a token may be a part of a character
    return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    return tokenizer.raw([token])
