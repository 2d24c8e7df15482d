"""Encoding long texts: bounds by the number of characters, and splitting without effect."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from dflash_jax.errors import InterruptedRequestError, PromptTooLongError, RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import (
    COMPOSED,
    LONG_TEXT,
    MOST_ALTERNATIVES,
    Tokenizer,
    encode,
    pieces_of,
    token_bound,
)
from dflash_jax.utils import interruption

PIECES = ("aa", "aaaa", "ab", "▁a", "Ġa", "ĠĠĠĠ", "▁▁", "e", "á", "fi", "\n\n")
TEXTS = st.text(
    st.sampled_from("aab  e\n\t\u0301\u0323\u1f82\ufb01\u3000é中🙂<>|x▁\x00"), max_size=80
)


def bpe(**more: Any) -> tokenizers.Tokenizer:
    """Return a byte-level or byte-fallback tokenizer with a few merges."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), "▁", "é", "\n"})
    pieces = [*alphabet, *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "aa", "aaaa", "▁▁"]
    merges = [("a", "a"), ("aa", "aa"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **more))


def byte_level() -> tokenizers.Tokenizer:
    core = bpe()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return core


def composing() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.NFC()
    return core


def compatible() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return core


def falling_back() -> tokenizers.Tokenizer:
    core = bpe(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return core


def joining() -> tokenizers.Tokenizer:
    core = bpe(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    core.normalizer = normalizers.Replace("aba", "e")
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return core


def unknown() -> tokenizers.Tokenizer:
    return bpe(unk_token="<unk>")


def stripping() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.Strip()
    core.add_special_tokens([AddedToken("<x>", lstrip=True, rstrip=True)])
    return core


def splitting() -> tokenizers.Tokenizer:
    core = bpe(unk_token="<unk>")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    return core


KNOWN = [
    byte_level, composing, compatible, falling_back, joining, unknown, stripping, splitting,
]  # fmt: skip


@pytest.mark.parametrize("make", KNOWN)
def test_no_text_has_fewer_tokens_than_its_bound(make: Callable[[], Any]) -> None:
    core = make()
    bound = token_bound(core)
    assert bound is not None

    @given(TEXTS)
    def holds(text: str) -> None:
        assert bound.min_tokens(text) <= len(core.encode(text, add_special_tokens=False).ids)

    holds()


@pytest.mark.parametrize("make", KNOWN)
def test_the_bound_grows_with_the_text(make: Callable[[], Any]) -> None:
    bound = token_bound(make())
    assert bound is not None
    assert bound.min_tokens("ab" * 10**6) >= 2 * 10**6 / 64


def test_the_longest_decomposition_is_the_one_that_is_counted_with() -> None:
    import sys
    import unicodedata

    characters = (chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000)
    assert max(len(unicodedata.normalize("NFD", c)) for c in characters) == COMPOSED


def without_bytes() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel()
    return core


def words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))


def fusing() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(
        models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)
    )


def removing() -> tokenizers.Tokenizer:
    core = bpe(unk_token="<unk>")
    core.pre_tokenizer = pre_tokenizers.Split("x", "removed")
    return core


def deleting() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.Replace("x", "")
    return core


def matching() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.Replace(tokenizers.Regex("x+"), "x")
    return core


def cleaning() -> tokenizers.Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.StripAccents()
    return core


def truncating() -> tokenizers.Tokenizer:
    core = byte_level()
    core.enable_truncation(4)
    return core


@pytest.mark.parametrize(
    "make",
    [without_bytes, words, fusing, removing, deleting, matching, cleaning, truncating],
)
def test_tokenizers_that_may_drop_text_have_no_bound_and_refuse_nothing(
    make: Callable[[], Any],
) -> None:
    core = make()
    assert token_bound(core) is None
    Tokenizer(core, None, {}).check_fits("x" * 30_000, 1)
    assert len(encode(core, "x" * 30_000, False)) <= 30_000


class Recorded:
    """A tokenizer that records its encoding calls."""

    def __init__(self, core: tokenizers.Tokenizer, then: Callable[[], None] = lambda: None):
        self.core, self.then = core, then
        self.calls: list[tuple[str, int]] = []

    def encode(self, text: str, **more: Any) -> Any:
        self.calls.append(("encode", len(text)))
        return self.core.encode(text, **more)

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        self.calls.append(("encode_batch_fast", sum(map(len, texts))))
        self.then()
        return self.core.encode_batch_fast(texts, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


def recorded(core: tokenizers.Tokenizer, **more: Any) -> Any:
    return Recorded(core, **more)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    core = recorded(byte_level())
    tokenizer = Tokenizer(core, None, {})
    with pytest.raises(RequestError, match="prompt is too long: 1667 tokens > 100 maximum") as told:
        tokenizer.check_fits("b" * 10_000, 100)
    assert isinstance(told.value, PromptTooLongError)
    assert "10000 characters" in str(told.value)
    assert core.calls == []
    tokenizer.check_fits("a" * 400, 100)
    assert len(tokenizer.encode("a" * 400)) == 100


def test_a_long_text_is_encoded_by_the_call_that_releases_the_interpreter_lock() -> None:
    core, text = recorded(byte_level()), "aab " * 10_000
    assert encode(core, text, True) == core.core.encode(text).ids
    assert core.calls == [("encode_batch_fast", len(text))]


MARKED = st.lists(
    st.sampled_from(["<x>", "<x><y>", "<y>", "x><", " ", "\n", "a", "é", "<N>", "<L>", "<R>", "<"]),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("make", [byte_level, composing, falling_back, joining, stripping])
def test_the_ids_of_the_pieces_are_the_ids_of_the_text(make: Callable[[], Any]) -> None:
    core = make()
    core.add_special_tokens([AddedToken(t, normalized=False) for t in ("<x><y>", "<x>", "<y>")])
    core.add_special_tokens([AddedToken("<L>", lstrip=True), AddedToken("<R>", rstrip=True)])
    core.add_tokens([AddedToken("<N>", normalized=True)])
    cut = 0

    @given(MARKED)
    def equal(text: str) -> None:
        nonlocal cut
        pieces = list(pieces_of(core, text, 1))
        assert "".join(pieces) == text
        cut += len(pieces) > 1
        ids = [i for piece in pieces for i in core.encode(piece, add_special_tokens=False).ids]
        assert ids == core.encode(text, add_special_tokens=False).ids

    equal()
    assert cut > 10


def test_texts_are_not_split_for_tokenizers_that_end_words_or_pad() -> None:
    whole = ["<x>a<x>a"]
    words, padded = byte_level(), byte_level()
    words.add_special_tokens(["<x>", AddedToken("w", single_word=True)])
    padded.add_special_tokens(["<x>"])
    assert len(list(pieces_of(padded, whole[0], 1))) == 2
    padded = byte_level()
    padded.add_special_tokens(["<x>"])
    padded.enable_padding(length=9)
    assert list(pieces_of(words, whole[0], 1)) == list(pieces_of(padded, whole[0], 1)) == whole


def test_texts_are_not_split_for_tokenizers_with_too_many_added_tokens() -> None:
    many, fewer = byte_level(), byte_level()
    fewer.add_special_tokens([f"<{i}>" for i in range(MOST_ALTERNATIVES)])
    many.add_special_tokens([f"<{i}>" for i in range(MOST_ALTERNATIVES + 1)])
    assert len(list(pieces_of(fewer, "<1>a<2>a", 1))) == 2
    assert list(pieces_of(many, "<1>a<2>a", 1)) == ["<1>a<2>a"]


def test_a_long_text_gets_one_start_token() -> None:
    core = byte_level()
    core.add_special_tokens(["<x>", "<s>"])
    start = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", start)])
    text = ("<x>" + "a" * 3000) * 10
    assert encode(core, text, True) == core.encode(text).ids
    assert encode(core, text, True).count(start) == 1
    assert encode(core, text, False) == core.encode(text, add_special_tokens=False).ids


def test_encoding_can_be_cancelled_between_two_pieces() -> None:
    gone = threading.Event()
    core = recorded(Tokenizer.from_directory(locate("tiny", "target")).core, then=gone.set)
    text = ("<|im_start|>" + "a" * LONG_TEXT) * 3
    with interruption.cancellable(gone), pytest.raises(InterruptedRequestError, match="cancelled"):
        encode(core, text, False)
    assert len(core.calls) == 1
