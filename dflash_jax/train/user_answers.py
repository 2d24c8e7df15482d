"""Conversations and texts learnt as given: the assistant turns of the data are wanted."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train.data import Example, rendered, split_start_token, token_ids
from dflash_jax.train.rows import Document


def as_given(
    examples: Sequence[Example], tokenizer: Tokenizer | None, ends: Sequence[int], longest: int
) -> list[Document]:
    """Return conversations and texts as documents, with assistant turns wanted.

    A conversation is one document, unless its template rewrites earlier turns. Tokens that differ
    from the target's own choice are not learnt, but they end the places that count.

    Args:
      ends: token ids that end a turn.
      longest: longer texts are cut into pieces.
    """
    documents = []
    for example in examples:
        if not example.messages:
            opening, ids = split_start_token(example, tokenizer)
            for start in range(0, len(ids), size := max(longest - len(opening), 1)):
                part = np.asarray([*opening, *ids[start : start + size]], np.int32)
                documents.append(Document(part, np.ones(len(part), bool)))
            continue
        assert tokenizer is not None or token_ids(example, tokenizer)
        turns: list[Document] = []
        for i, message in enumerate(example.messages):
            if message["role"] == "assistant" and i and tokenizer is not None:
                for turn in _turn(example, i, tokenizer, ends):
                    earlier = turns[-1:]
                    if earlier and _continues(turn, earlier[0]):
                        turn.wanted[: len(earlier[0].ids)] |= earlier[0].wanted
                        turns.pop()
                    turns.append(turn)
        documents += turns
    return documents


def _continues(turn: Document, earlier: Document) -> bool:
    return np.array_equal(turn.ids[: len(earlier.ids)], earlier.ids)


def _turn(example: Example, i: int, tokenizer: Tokenizer, ends: Sequence[int]) -> list[Document]:
    """Return the conversation up to an assistant turn, rendered with and without that turn."""
    prompt = rendered(example, i, tokenizer)
    whole = rendered(example, i + 1, tokenizer, add_generation_prompt=False)
    # Some templates close the reasoning of an opened turn and omit it from finished turns.
    openings = [prompt, rendered(dataclasses.replace(example, thinking=True), i, tokenizer)]
    reply = next((whole[len(text) :] for text in openings if whole.startswith(text)), None)
    if reply is None:
        return []  # the template rewrites history here
    before, ids = (tokenizer.encode(text, specials=False) for text in (prompt, whole))
    if ids[: len(before)] != before:  # a token spans the boundary, or the prompt is no prefix
        ids = [*before, *tokenizer.encode(reply, specials=False)]
    final = range(len(ids) - 1, len(before) - 1, -1)
    last = next((j for j in final if ids[j] in ends), len(ids) - 1)
    tokens = np.asarray(ids[: last + 1], np.int32)
    return [Document(tokens, np.arange(len(tokens)) >= len(before))]
