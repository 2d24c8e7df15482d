"""Encoding of texts of any length without blocking other threads.

Encoding tens of millions of characters takes minutes and gigabytes. Texts that cannot fit are
detected before encoding: a token covers at most as many characters as the longest entry of the
vocabulary, and normalization shortens a text by at most a known factor. If a step is unknown, or
may drop text, there is no bound, and the text is encoded.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from dflash_jax.errors import PromptTooLongError
from dflash_jax.utils import interruption

LONG_TEXT = 20_000  # characters from which encoding releases the interpreter lock
COMPOSED = 4  # most characters that NFC and NFKC combine: the longest decomposition in Unicode
MOST_ALTERNATIVES = 256  # of a pattern; trying more at every "<" is too slow
SLICE = 2**16  # characters to split at white space at once, with the interpreter lock held
LENGTHENING = {"Lowercase", "NFD", "NFKD", "ByteLevel", "Prepend"}  # normalizers
KEEPING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}
SPACE_DROPPING = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}

Part = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TokenBound:
    """Upper bound for the characters that a token covers.

    Attributes:
      characters: most characters of the text per token.
      spaces: whether white space counts; False if the tokenizer may drop it.
    """

    characters: int
    spaces: bool

    def min_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens of a text."""
        return -(-self.counted(text) // self.characters)

    def counted(self, text: str) -> int:
        """Return the number of characters that become part of a token for certain."""
        if self.spaces:
            return len(text)
        slices = (text[at : at + SLICE] for at in range(0, len(text), SLICE))
        return sum(sum(map(len, part.split())) for part in slices)


def encode(core: tokenizers.Tokenizer, text: str, specials: bool) -> list[int]:
    """Return the ids of a well-formed text; see `Tokenizer.encode`."""
    if len(text) < LONG_TEXT:
        return core.encode(text, add_special_tokens=specials).ids
    ids: list[int] = []
    for piece in [text] if specials else pieces_of(core, text, LONG_TEXT):
        interruption.check()
        # Unlike `encode`, the batch call releases the interpreter lock.
        ids += core.encode_batch_fast([piece], add_special_tokens=specials)[0].ids
    return ids


def check_characters(core: tokenizers.Tokenizer, text: str, max_tokens: int) -> None:
    """Check that a text's characters may fit into `max_tokens` tokens.

    Raises:
      PromptTooLongError: they do not.
    """
    if len(text) <= max_tokens or (bound := token_bound(core)) is None:
        return
    if (least := bound.min_tokens(text)) > max_tokens:
        raise PromptTooLongError(
            f"prompt is too long: {least} tokens > {max_tokens} maximum, at least: it has"
            f" {len(text)} characters, and a token of this model covers at most"
            f" {bound.characters}; shorten the prompt"
        )


@functools.lru_cache(maxsize=8)
def token_bound(core: tokenizers.Tokenizer) -> TokenBound | None:
    """Return the bound of a tokenizer, or None if there is none."""
    settings = json.loads(core.to_str())
    added, model = settings["added_tokens"], settings["model"]
    normalizers = list(_steps(settings["normalizer"], "normalizers"))
    splitters = list(_steps(settings["pre_tokenizer"], "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    if settings["truncation"] or not _covers(model, byte_level=byte_level):
        return None
    shrinks = [_shrink(step) for step in normalizers]
    if None in shrinks or not all(map(_keeps, splitters)):
        return None
    pieces = (*model["vocab"], *(token["content"] for token in added))
    characters = max(map(len, pieces), default=1) or 1
    for shrink in shrinks:
        characters *= shrink or 1
    dropping = {step["type"] for step in (*normalizers, *splitters)} & {*SPACE_DROPPING, "Strip"}
    spaces = not dropping and not any(token["lstrip"] or token["rstrip"] for token in added)
    return TokenBound(characters, spaces)


def _steps(part: Part | None, inner: str) -> Iterable[Part]:
    """Yield the steps of a normalizer or pre-tokenizer, with sequences flattened."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[inner]:
        yield from _steps(step, inner)


def _shrink(normalizer: Part) -> int | None:
    """Return the most characters that a normalizer makes one, or None if unknown."""
    kind = normalizer["type"]
    if kind in LENGTHENING or kind == "Strip":  # stripped white space is not counted
        return 1
    if kind in ("NFC", "NFKC"):  # decomposition never shortens
        return COMPOSED
    if kind == "Replace" and (old := normalizer["pattern"].get("String")):
        new = normalizer["content"]
        return -(-len(old) // len(new)) if new else None
    return None


def _keeps(splitter: Part) -> bool:
    """Whether a pre-tokenizer drops nothing but white space."""
    if splitter["type"] in SPACE_DROPPING:
        return True
    return splitter["type"] in KEEPING and splitter.get("behavior") != "Removed"


def _covers(model: Part, *, byte_level: bool) -> bool:
    """Whether every character becomes part of a token; none is dropped or merged as unknown."""
    if model["type"] != "BPE":  # others make an unknown word of any length one token
        return False
    vocabulary = model["vocab"]
    if byte_level:
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["unk_token"] in vocabulary and not model["fuse_unk"]


def pieces_of(core: tokenizers.Tokenizer, text: str, least: int) -> Iterator[str]:
    """Cut a text into pieces whose concatenated ids are the ids of the text.

    The tokenizer first finds added tokens that are not normalized, and encodes the text between two
    of them separately. So a text may be cut in front of one.

    Args:
      least: least characters of a piece; the last one may have fewer.
    """
    begun = 0
    pattern, plain = _boundaries(core)
    for match in pattern.finditer(text) if plain else ():
        if match.start() - begun >= least and match.group() in plain:
            yield text[begun : match.start()]
            begun = match.start()
    yield text[begun:]


@functools.lru_cache(maxsize=8)
def _boundaries(core: tokenizers.Tokenizer) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return a pattern that finds added tokens as the tokenizer does, and those to cut before.

    The tokenizer takes the leftmost match, and the longest one there. No token is returned to cut
    before if the text after a cut may change the ids before it.
    """
    added = core.get_added_tokens_decoder().values()
    raw = sorted(
        (t for t in added if t.content and not t.normalized), key=lambda t: -len(t.content)
    )
    pattern = re.compile("|".join(re.escape(token.content) for token in raw))
    unsafe = core.truncation or core.padding or core.encode_special_tokens
    if unsafe or any(token.single_word for token in added) or len(raw) > MOST_ALTERNATIVES:
        return pattern, frozenset()
    return pattern, frozenset(token.content for token in raw if not token.lstrip)
