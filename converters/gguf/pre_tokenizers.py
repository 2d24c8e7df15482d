"""How families split a text into words before byte-pair encoding, by `tokenizer.ggml.pre`.

The patterns are those of published tokenizer.json files, or of llama.cpp's vocabulary code where
none is published. Names that llama.cpp treats alike share an entry.
"""

from dataclasses import dataclass
from typing import Any


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
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ONE_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_ALL_DIGITS = r"\p{N}+"
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
    upper = _UPPER
    lower = _LOWER
    if without:
        upper = f"{upper[:-1]}&&[^{without}]]"
        lower = f"{lower[:-1]}&&[^{without}]]"
    if endings:
        endings += "?"
    words = (f"{_LEAD}{upper}*{lower}+{endings}", f"{_LEAD}{upper}+{lower}*{endings}")
    return "|".join((*words, digits, other, _SPACES))


_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_OTHER}|{_BLANKS}"
_QWEN2 = _words(_ONE_DIGIT)
_LLAMA3 = _words(_THREE_DIGITS)
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
