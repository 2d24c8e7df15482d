"""Tokenizer, chat template and stop tokens from GGUF metadata, as Hugging Face files.

Byte-level BPE, Gemma 4's BPE over characters and SentencePiece's are rebuilt; other kinds are
refused. Facts from llama.cpp's vocabulary code and published tokenizer.json files.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.converters.gguf.file import STRING, GgufArray
from dflash_jax.errors import CheckpointError, TokenizerError
from dflash_jax.utils.kept_files import kept_by_default

KEPT = "tokenizers"  # folder of rebuilt tokenizers
MOST_BYTES = 2**28  # of the folder

# Kinds of the tokens of a GGUF file: text, control tokens, bytes, and others.


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MARK = re.compile("(?!<0x)<[^<>\\s]+>|\\[[A-Z_/]+\\]")  # the form of tokens that mark turns
PIPES = ("<|", "<\uff5c")


def guessed_kinds(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    """Return token kinds for a file without them: named ids and <|marks|> are control tokens."""
    named = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")

    def kind(i: int, token: str) -> int:
        if i == unknown:
            return UNKNOWN
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return BYTE
        marked = len(token) > 4 and token.startswith("<|") and token.endswith("|>")
        return CONTROL if marked or i in named else NORMAL

    return [kind(i, token) for i, token in enumerate(tokens)]


def corrected_kinds(
    kinds: Sequence[int], tokens: Sequence[str], named: Collection[Any], template: str
) -> tuple[list[int], str]:
    """Return token kinds with marks that start or end turns as control tokens, and a warning.

    As normal tokens they would be spelt in pieces wherever the chat template writes them.

    Args:
      named: ids that the file names as start or end tokens.
      template: text of the chat template.
    """

    def marks(i: int, token: str) -> bool:
        written = token[:2] in PIPES and token in template
        return (i in named or written) and MARK.fullmatch(token) is not None

    found = {i for i, token in enumerate(tokens) if kinds[i] == NORMAL and marks(i, token)}
    if not found:
        return list(kinds), ""
    listed = ", ".join(repr(tokens[i]) for i in sorted(found)[:5])
    note = (
        f"tokenizer.ggml.token_type says that {listed} are normal text; they are read as control"
        " tokens, since they mark turns"
    )
    return [CONTROL if i in found else kind for i, kind in enumerate(kinds)], note


# How families split a text into words before byte-pair encoding, by `tokenizer.ggml.pre`.
#
# The patterns are those of published tokenizer.json files, or of llama.cpp's vocabulary code where
# none is published. Names that llama.cpp treats alike share an entry.


@dataclass(frozen=True)
class PreTokenizer:
    """How a family splits a text into words, and what else depends on the family.

    Attributes:
      patterns: applied in turn to the pieces so far; matches become pieces, and so does the text
        between two matches.
      composed: whether a text is normalised to NFC first.
      whole_words: whether a word that is a token is used without looking at merges.
      starts: whether the start token is added if the file does not say.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole_words: bool = False
    starts: bool = False

    def normalizer(self) -> dict[str, Any] | None:
        """Return the normalizer of a tokenizer.json."""
        return {"type": "NFC"} if self.composed else None

    def splits(self) -> list[dict[str, Any]]:
        """Return the steps of a tokenizer.json that split a text."""
        how = {"behavior": "Isolated", "invert": False}
        return [{"type": "Split", "pattern": {"Regex": each}} | how for each in self.patterns]


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _LEAD + r"\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_BLANKS = r"\s+(?!\S)|\s+"
_SPACES = rf"\s*[\r\n]+|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ONE_DIGIT, _THREE_DIGITS, _ALL_DIGITS = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"
_KANA = "\u3040-\u309f\u30a0-\u30ff"


def _words(
    digits: str, word: str = _WORD, other: str = _OTHER + r"[\r\n]*", spaces: str = _SPACES
) -> str:
    """Return the pattern of contractions, words, digits, other characters and white space."""
    return "|".join((_CONTRACTIONS, word, digits, other, spaces))


def _cased(
    digits: str, *, endings: str = "", without: str = "", other: str = _OTHER + r"[\r\n/]*"
) -> str:
    """Return the pattern of words that change from upper to lower case at most once.

    Args:
      endings: pattern of the endings that belong to a word.
      without: the class of characters that words do not contain.
    """
    upper, lower = (c[:-1] + f"&&[^{without}]]" if without else c for c in (_UPPER, _LOWER))
    endings += "?" if endings else ""
    words = (f"{_LEAD}{upper}*{lower}+{endings}", f"{_LEAD}{upper}+{lower}*{endings}")
    return "|".join((*words, digits, other, _SPACES))


_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_OTHER}|{_BLANKS}"
_QWEN2, _LLAMA3 = _words(_ONE_DIGIT), _words(_THREE_DIGITS)
_QWEN35 = _words(_ONE_DIGIT, _LEAD + r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_GPT4O = _cased(_THREE_DIGITS, endings=_CONTRACTIONS)
_ONE_BREAK = rf"\s*[\r\n]|{_BLANKS}"
_PHRASES_WORD = _LEAD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_BETWEEN_MARKS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HALVES = "|".join(rf"\s{{{1 << i}}}(?!\S)" for i in range(9, 1, -1))
_JAIS2 = _words(_THREE_DIGITS, spaces=rf"\s*[\r\n]+|{_HALVES}|\s{{1,2}}(?!\S)|\s{{1}}")
_HAN = r"\p{Han}"
_KIMI = _cased(_THREE_DIGITS, endings=_CONTRACTIONS, without=_HAN, other=_OTHER + r"[\r\n]*")
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|[\u4e00-\u9fa5{_KANA}]+"
)

# Letters with case in most scripts; DeepSeek lists them.
_CASED_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    rf"\s?[{_MARKS}]+",
    r"\s+$",
    _EAST_ASIAN,
    _ALL_DIGITS,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _ONE_DIGIT)
_CALLS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK_WORD = _CALLS + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_V3 = (
    _THREE_DIGITS,
    f"[\u4e00-\u9fa5{_KANA}]+",
    rf"{_DEEPSEEK_WORD}[\r\n]*|{_SPACES}",
)
_SPARK = (*_DEEPSEEK_V3[:2], rf"{_DEEPSEEK_WORD}|[\r\n]|{_BLANKS}", _ONE_DIGIT)

_BY_NAMES = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling": PreTokenizer(
        (_GPT2,)
    ),
    "mpt olmo": PreTokenizer((_GPT2,), composed=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer(
        (_ONE_DIGIT, _GPT2)
    ),
    "command-r": PreTokenizer((_ONE_DIGIT, _GPT2), composed=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "superbpe": PreTokenizer((_ALL_DIGITS, r"(?=(\d{3})+(?!\d))")),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BETWEEN_MARKS,)),
    "viking": PreTokenizer((_BETWEEN_MARKS, _ONE_DIGIT)),
    "qwen2 deepseek-r1-qwen kormo": PreTokenizer((_QWEN2,), composed=True),
    "qwen35": PreTokenizer((_QWEN35,), composed=True),
    "stablelm2 hunyuan solar-open grok-2 megrez": PreTokenizer((_QWEN2,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)),
    "seed-coder": PreTokenizer((_words(_ONE_DIGIT, other=_OTHER),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_words(_ONE_DIGIT, spaces=_ONE_BREAK),)),
    "exaone-moe": PreTokenizer(
        (_words(_ONE_DIGIT, _PHRASES_WORD, _OTHER + r"[\r\n/]?", _ONE_BREAK),)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), whole_words=True, starts=True
    ),
    "chatglm-bpe dbrx smaug-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), whole_words=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    "minicpm5": PreTokenizer((_THREE_DIGITS, _words(_ALL_DIGITS)), whole_words=True),
    "gpt-4o llama4": PreTokenizer((_GPT4O,), whole_words=True),
    "kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "tekken": PreTokenizer((_cased(_ONE_DIGIT),), whole_words=True, starts=True),
    "youtu": PreTokenizer((_YOUTU, _cased(_ONE_DIGIT, endings=_CONTRACTIONS)), whole_words=True),
    "kimi-k2": PreTokenizer((f"[{_HAN}]+|{_KIMI}",)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK_V3),
    "spark2_5": PreTokenizer(_SPARK),
}
PRE_TOKENIZERS = {name: how for names, how in _BY_NAMES.items() for name in names.split()}


MAX_STRINGS = 1 << 22

# A file names one end token; families end a turn with any of these.
_CHAT = ("<|im_end|>", "<|endoftext|>")
STOP_TEXTS = {
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm4": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gpt-oss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "granite": ("<|end_of_text|>",),
    "llama": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", *_CHAT),
    "lfm2": _CHAT,
    "olmo2": ("<|endoftext|>",),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "qwen2": _CHAT,
    "qwen3": _CHAT,
    "qwen35": _CHAT,
    "qwen35moe": _CHAT,
    "qwen3moe": _CHAT,
    "qwen3next": _CHAT,
    "smollm3": ("<|end_of_text|>", "<|im_end|>"),
}
# Tokens that files name as end tokens, but that end only a part of an answer in the family.
PART_ENDS = {"gpt-oss": ("<|end|>",), "gemma4": ("</s>",)}
SPACE = "\u2581"  # the space in vocabularies of characters
OF_CHARACTERS = ("gemma4", "llama")  # the latter is SentencePiece's
LONGEST = 1024  # characters of a merged token
KEEPING_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's added tokens


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json; empty without a tokenizer.

    Raises:
      TokenizerError: the tokenizer cannot be rebuilt from metadata.
      CheckpointError: its metadata is damaged.
    """
    if "tokenizer.ggml.model" not in metadata:
        return {}
    whole = metadata.get("tokenizer.huggingface.json")
    core = whole if isinstance(whole, str) else _core(metadata)
    return {
        "tokenizer.json": core,
        "tokenizer_config.json": json.dumps(_settings(metadata), indent=1),
    }


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return end tokens: those of the file, then others that its family is known to use."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    found = [i for i in named if type(i) is int]
    family = str(metadata.get("general.architecture"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    if family in STOP_TEXTS and isinstance(tokens, GgufArray):
        texts = tokens.tolist()
        wanted, parts = set(STOP_TEXTS[family]), PART_ENDS.get(family, ())
        found += [i for i, token in enumerate(texts) if token in wanted]
        found = [i for i in found if not (0 <= i < len(texts) and texts[i] in parts)]
    return tuple(dict.fromkeys(found))


def _core(metadata: Mapping[str, Any]) -> str:
    """Return the text of tokenizer.json, which takes seconds for 262,000 tokens, and is kept."""
    kept, key = kept_by_default(KEPT, MOST_BYTES), _digest(metadata)
    if kept and (found := kept.read(key)):
        return found.decode()
    core, note = _rebuilt(metadata)
    text = json.dumps(core)
    if note:
        warnings.warn(note, stacklevel=4)
    elif kept:
        kept.write(key, text.encode())
    return text


def _digest(metadata: Mapping[str, Any]) -> str:
    """Return the digest of all that decides how a tokenizer is rebuilt, this code included."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    for key, value in sorted(metadata.items()):
        if key.startswith(("tokenizer.", "general.")):
            listed = isinstance(value, GgufArray)
            found.update(repr((key, len(value) if listed else value)).encode())
            if listed:
                found.update(value.raw)
    return found.hexdigest()


def _rebuilt(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return tokenizer.json, and a warning or nothing."""
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind not in OF_CHARACTERS and (kind != "gpt2" or _splitting(metadata) is None):
        raise TokenizerError(
            f"the tokenizer {kind!r} with the word pattern {pre!r} cannot be rebuilt; known are"
            f" {', '.join(map(repr, OF_CHARACTERS))}, and 'gpt2' with one of {len(PRE_TOKENIZERS)}"
            " patterns (see docs/converting.md). Give the folder of the original tokenizer"
            " (--tokenizer, or tokenizer=)"
        )
    tokens, kinds, note = _tokens(metadata)
    build = _characters if kind in OF_CHARACTERS else _byte_level
    return build(metadata, tokens, kinds), note


def _characters(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Return a BPE over characters of whole texts, where unknown characters become bytes.

    Gemma 4 lists its merges, and keeps runs of newlines that are tokens, as llama.cpp does.
    SentencePiece merges the pair with the highest score, and puts a space before the text. Its
    added tokens are found in the raw text, so runs of spaces keep the spaces that files show.
    """
    gemma, whole = metadata["tokenizer.ggml.model"] == "gemma4", kinds
    spelt = [token.replace(" ", SPACE) for token in tokens] if gemma else tokens
    if gemma:
        runs = {i for i, token in enumerate(tokens) if len(token) > 1 and not token.strip("\n")}
        whole = [USER_DEFINED if i in runs else kind for i, kind in enumerate(kinds)]
    vocabulary = _vocabulary(spelt, kinds)
    merges = _merges(metadata, vocabulary, kinds) if gemma else _scored(metadata, spelt, kinds)
    replaced: dict[str, Any] = {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": SPACE,
    }
    before = not gemma and metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    prepend = {"type": "Prepend", "prepend": SPACE}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    known = type(unknown) is int and 0 <= unknown < len(tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, spelt, whole),
        "normalizer": (
            {"type": "Sequence", "normalizers": [prepend, replaced]} if before else replaced
        ),
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens, None),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if before else []),
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown] if known else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _scored(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> list[list[str]]:
    """Return all pairs of tokens that form a token, ordered by its score, best first."""
    listed = metadata.get("tokenizer.ggml.scores")
    scores = listed.tolist() if isinstance(listed, GgufArray) else []
    if len(scores) < len(tokens) or not all(map(math.isfinite, scores)):
        raise CheckpointError(
            f"tokenizer.ggml.scores has no number for each of {len(tokens)} tokens; fetch the file"
            " again"
        )
    merged = (NORMAL, USER_DEFINED)  # an added token that text spells otherwise is merged, too
    ids = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in merged}
    pairs = []  # sorted as tuples: by score, token and first part
    for token, i in ids.items():
        for at in range(1, min(len(token), LONGEST)):
            if (left := token[:at]) in ids and token[at:] in ids:
                pairs.append((-scores[i], i, ids[left], left, token[at:]))
    pairs.sort()
    return [[left, right] for *_, left, right in pairs]


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Return ids by text, without padding."""
    found = {t: i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k != UNUSED}
    if len(found) + kinds.count(UNUSED) != len(tokens):
        raise CheckpointError("two tokens of the vocabulary are equal; fetch the file again")
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    splitting = _splitting(metadata)
    assert splitting is not None, "checked before"
    vocabulary = _vocabulary(tokens, kinds)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    byte_level |= {"use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, tokens, kinds),
        "normalizer": splitting.normalizer(),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splitting.splits(), byte_level],
        },
        "post_processor": _post_processor(metadata, tokens, byte_level),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": splitting.whole_words,
            "vocab": vocabulary,
            "merges": _merges(metadata, vocabulary, kinds),
        },
    }


def _splitting(metadata: Mapping[str, Any]) -> PreTokenizer | None:
    named = metadata.get("tokenizer.ggml.pre")
    return PRE_TOKENIZERS.get(named) if isinstance(named, str) else None


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int], str]:
    """Return the tokens, their kinds, and a warning or nothing."""
    texts = _strings(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not texts:
        raise CheckpointError("tokenizer.ggml.tokens is missing or empty; fetch the file again")
    if kinds is None:
        return texts, guessed_kinds(metadata, texts), ""
    if not isinstance(kinds, GgufArray) or len(kinds) < len(texts):
        raise CheckpointError(
            f"tokenizer.ggml.token_type is shorter than the {len(texts)} tokens; fetch it again"
        )
    named = {*stop_ids(metadata), metadata.get("tokenizer.ggml.bos_token_id")}
    template = json.dumps(_template(metadata), ensure_ascii=False)
    return texts, *corrected_kinds(kinds.tolist()[: len(texts)], texts, named, template)


def _added(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> list[dict[str, Any]]:
    """Return the tokens that are found in raw text before it is divided."""
    stripping = _is_phi3(metadata)
    plain = {"single_word": False, "lstrip": False, "normalized": False}
    return [
        {
            "id": i,
            "content": token,
            "special": kind != USER_DEFINED,
            "rstrip": stripping and token not in KEEPING_SPACES,
        }
        | plain
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Whether added tokens take the white space after them, which files do not say."""
    name = str(metadata.get("general.name")).lower()
    architecture = metadata.get("general.architecture")
    named = architecture == "phi3" or "phi-3" in name or "phi3" in name
    return named and metadata["tokenizer.ggml.model"] == "llama"


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """Return an array of strings; empty if it is missing."""
    listed = metadata.get(key)
    if listed is None:
        return []
    if not isinstance(listed, GgufArray) or listed.kind != STRING or len(listed) > MAX_STRINGS:
        raise CheckpointError(
            f"{key} is no array of at most {MAX_STRINGS} strings; fetch the file again"
        )
    return listed.tolist()


def _merges(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], kinds: list[int]
) -> list[list[str]]:
    lines = _strings(metadata, "tokenizer.ggml.merges")
    if not lines and any(len(t) > 1 and kinds[i] == NORMAL for t, i in vocabulary.items()):
        raise TokenizerError(
            "the file lists no merges (tokenizer.ggml.merges), without which its tokenizer cannot"
            " be rebuilt. Give the folder of the original tokenizer (--tokenizer, or tokenizer=)"
        )
    merges = []
    for line in lines:
        space = line.find(" ", 1)  # a left part may itself begin with one
        left, right = line[:space], line[space + 1 :]
        known = left in vocabulary and right in vocabulary and left + right in vocabulary
        if space < 0 or not known:
            raise CheckpointError(
                f"the merge {line!r} is not two tokens of the vocabulary that make a third; fetch"
                " the file again"
            )
        merges.append([left, right])
    return merges


def _starts(metadata: Mapping[str, Any]) -> bool:
    if metadata.get("tokenizer.ggml.model") == "gemma4":
        return True  # whatever the file says
    splitting = _splitting(metadata)
    default = metadata["tokenizer.ggml.model"] == "llama" or bool(splitting and splitting.starts)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _post_processor(
    metadata: Mapping[str, Any], tokens: list[str], byte_level: dict[str, Any] | None
) -> dict[str, Any] | None:
    start = metadata.get("tokenizer.ggml.bos_token_id")
    if not _starts(metadata) or type(start) is not int or not 0 <= start < len(tokens):
        return byte_level
    token = {"SpecialToken": {"id": tokens[start], "type_id": 0}}
    first, second = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    entry = {"id": tokens[start], "ids": [start], "tokens": [tokens[start]]}
    template = {
        "type": "TemplateProcessing",
        "single": [token, first],
        "pair": [token, first, second],
        "special_tokens": {tokens[start]: entry},
    }
    return {"type": "Sequence", "processors": [byte_level, template]} if byte_level else template


def _settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = tokens.tolist() if isinstance(tokens, GgufArray) else []
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, ours in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        i = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(i) is int and 0 <= i < len(texts):
            found[f"{ours}_token"] = texts[i]
    found["add_bos_token"] = _starts(metadata)
    template = _template(metadata)
    return found | ({"chat_template": template} if template else {})


def _template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if not named:
        return default if isinstance(default, str) else None
    every = ({"default": default} if isinstance(default, str) else {}) | named
    return [{"name": k, "template": v} for k, v in every.items() if isinstance(v, str)]
