"""Log-probabilities of output tokens in the shapes of chat completions and of completions."""

from collections.abc import Sequence
from typing import Any

from dflash_jax.engine.result import TokenLogprob
from dflash_jax.tokenizer import TextStream, Tokenizer


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions, for `TokenLogprob`s in order."""
    content = []
    for entry in entries:
        top = [_entry(token, value, tokenizer) for token, value in entry.top]
        content.append(_entry(entry.token_id, entry.logprob, tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None, said: TextStream | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of completions; the token that was said is among the likeliest.

    Of a token whose log-probability nobody knows, as a prompt's first, both are null.


    Args:
      said: the output before these tokens, to which they are added. A token's offset is the
        number of whole characters before it.
    """
    said = said or (tokenizer.stream() if tokenizer else None)
    offsets, top = [], []
    for entry in entries:
        offsets.append(len(said.text) if said else 0)
        if said:
            said.push([entry.token_id])
        own = () if entry.logprob is None else ((entry.token_id, entry.logprob),)
        top.append({_text(i, tokenizer): value for i, value in (*entry.top, *own)} or None)
    return {
        "tokens": [_text(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob], most: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token what is known by id, the token itself included.

    None for the first, of which nobody knows anything. The rank of a token that is none of the
    likeliest is not known either.

    Args:
      most: how many of the likeliest to name.
    """
    told: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry.logprob is None:
            told.append(None)
            continue
        ranked = [(token, value, at + 1) for at, (token, value) in enumerate(entry.top)]
        own = (entry.token_id, entry.logprob, None)
        known = {token: (value, rank) for token, value, rank in (own, *ranked)}
        wanted = (entry.token_id, *(token for token, _, _ in ranked[:most]))
        told.append(
            {
                str(token): {
                    "logprob": known[token][0],
                    "rank": known[token][1],
                    "decoded_token": _text(token, tokenizer),
                }
                for token in wanted
            }
        )
    return told


def _entry(token: int, value: float | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    known = tokenizer.raw_bytes(token) if tokenizer else None
    said = None if known is None else list(known)
    return {"token": _text(token, tokenizer), "logprob": value, "bytes": said}


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    return tokenizer.raw([token])
