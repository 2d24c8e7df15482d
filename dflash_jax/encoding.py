"""Encoding of texts of any length, which holds up no other thread.

Encoding tens of millions of characters takes minutes and gigabytes. A text that cannot fit is
recognised before: a token covers at most as many characters as its entry in the vocabulary has,
and the known steps before the vocabulary shorten a text by a known factor at most. Where a step is
unknown, or may drop text, there is no bound and the text is encoded.
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

LONG_TEXT = 20_000  # characters from which encoding leaves the interpreter lock to other threads
COMPOSED = 4  # characters that NFC and NFKC make one at most: the longest decomposition in Unicode
MOST_ALTERNATIVES = 256  # of a pattern; trying more at every "<" takes too long
SLICE = 2**16  # characters that are split at white space at once: the interpreter lock is held
LENGTHENING = {"Lowercase", "NFD", "NFKD", "ByteLevel", "Prepend"}  # normalizers
KEEPING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}
SPACE_DROPPING = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}

Part = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TokenBound:
    """How much of a text one token covers at most.

    Attributes:
      characters: characters of the text for each token.
      spaces: white space counts; False where the tokenizer may drop it.
    """

    characters: int
    spaces: bool

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that encoding the text reaches in any case."""
        return -(-self.counted(text) // self.characters)

    def counted(self, text: str) -> int:
        """Return the number of characters that certainly become part of a token."""
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
    """Raise PromptTooLongError if the text has too many characters for so few tokens."""
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
    """Return the bound of a tokenizer, or None where its files allow none."""
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
    """The steps of a normalizer or pre-tokenizer, sequences resolved."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[inner]:
        yield from _steps(step, inner)


def _shrink(normalizer: Part) -> int | None:
    """How many characters a normalizer makes one at most; None if that is not known."""
    kind = normalizer["type"]
    if kind in LENGTHENING or kind == "Strip":  # stripped white space is not counted
        return 1
    if kind in ("NFC", "NFKC"):  # decomposing never shortens, and one character gives at most this
        return COMPOSED
    if kind == "Replace" and (old := normalizer["pattern"].get("String")):
        new = normalizer["content"]
        return -(-len(old) // len(new)) if new else None
    return None


def _keeps(splitter: Part) -> bool:
    """Whether a pre-tokenizer drops white space at most."""
    if splitter["type"] in SPACE_DROPPING:
        return True
    return splitter["type"] in KEEPING and splitter.get("behavior") != "Removed"


def _covers(model: Part, *, byte_level: bool) -> bool:
    """Whether every character becomes a part of a token: none dropped, none fused as unknown."""
    if model["type"] != "BPE":  # the others make a word or a run of any length one unknown token
        return False
    vocabulary = model["vocab"]
    if byte_level:
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["unk_token"] in vocabulary and not model["fuse_unk"]


def pieces_of(core: tokenizers.Tokenizer, text: str, least: int) -> Iterator[str]:
    """Cut a text into pieces whose ids, one after another, are the ids of the text.

    Added tokens that are looked for in the text as it is given are found before anything else, and
    the text between two of them is encoded on its own. So a text may be cut in front of one.

    Args:
      least: characters of a piece, but for the last.
    """
    begun = 0
    pattern, plain = _boundaries(core)
    for found in pattern.finditer(text) if plain else ():
        if found.start() - begun >= least and found.group() in plain:
            yield text[begun : found.start()]
            begun = found.start()
    yield text[begun:]


@functools.lru_cache(maxsize=8)
def _boundaries(core: tokenizers.Tokenizer) -> tuple[re.Pattern[str], frozenset[str]]:
    """A pattern that finds added tokens as the tokenizer does, and those to cut in front of.

    The tokenizer takes the leftmost match, of several the longest. None may be cut at where the
    text behind a cut matters to the text before it.
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
