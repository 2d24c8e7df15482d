"""Turn text into documents: token ids, and a mask of those that the assistant writes."""

from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer

from dflash_jax.train.documents import pieces
from dflash_jax.train.rows import Document
from recipes.tiny import vocabulary


def conversations(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Document]:
    """Return rendered conversations; assistant turns are wanted, their end included."""
    opening = tokenizer.encode(vocabulary.TURN_START + "assistant\n").ids
    end = vocabulary.token_id(tokenizer, vocabulary.TURN_END)
    return [
        Document(ids, answers(ids, opening, end))
        for ids in (np.asarray(e.ids, np.int32) for e in tokenizer.encode_batch(list(texts)))
    ]


def answers(ids: np.ndarray, opening: list[int], end: int) -> np.ndarray:
    """Return a mask that is true after each opening, up to and including the next end."""
    wanted = np.zeros(len(ids), bool)
    inside = False
    for i, token in enumerate(ids):
        wanted[i] = inside
        if inside:
            inside = token != end
        elif i + 1 >= len(opening) and list(ids[i + 1 - len(opening) : i + 1]) == opening:
            inside = True
    return wanted


def sources(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> list[Document]:
    """Return source files in pieces of `length` tokens, all wanted, the file's end marked."""
    end = vocabulary.token_id(tokenizer, vocabulary.END_OF_TEXT)
    found = []
    for encoding in tokenizer.encode_batch(list(texts)):
        found += pieces(np.asarray([*encoding.ids, end], np.int32), length)
    return found
