"""From text to documents: token ids with a mark on those that an assistant has to write."""

from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer

from dflash_jax.train import vocabulary
from dflash_jax.train.rows import Document


def conversations(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Document]:
    """Rendered conversations; what stands in assistant turns is wanted, their end included."""
    opening = tokenizer.encode(vocabulary.TURN_START + "assistant\n").ids
    end = vocabulary.token_id(tokenizer, vocabulary.TURN_END)
    return [
        Document(ids, answers(ids, opening, end))
        for ids in (np.asarray(e.ids, np.int32) for e in tokenizer.encode_batch(list(texts)))
    ]


def answers(ids: np.ndarray, opening: list[int], end: int) -> np.ndarray:
    """True from behind each opening up to and including the next end."""
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
    """Source files in pieces of `length` tokens, every token wanted, the file's end marked."""
    end = vocabulary.token_id(tokenizer, vocabulary.END_OF_TEXT)
    found = []
    for encoding in tokenizer.encode_batch(list(texts)):
        found += pieces(np.asarray([*encoding.ids, end], np.int32), length)
    return found


def pieces(ids: np.ndarray, length: int) -> Iterator[Document]:
    """Consecutive pieces; a last one shorter than a quarter is dropped."""
    for start in range(0, len(ids), length):
        part = ids[start : start + length]
        if len(part) * 4 >= length:
            yield Document(part, np.ones(len(part), bool))
