import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from gguf_models import finish

from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from dflash_jax.converters.gguf.tokenizer import tokenizer_files

# Of the tokenizer.json files of DeepSeek-V3, gpt-oss-20b, Llama 3, Qwen3, Qwen3.5 and Mistral-Nemo.
PUBLISHED = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
PIECES = [  # pieces are separated by "·"
    ("smollm", "In 2024, it's 12 o'clock.", "In· ·2·0·2·4·,· it·'s· ·1·2· o·'·clock·."),
    ("gpt-2", "In 2024, it's\n\n  12 o'clock.", "In· 2024·,· it·'s·\n\n · 12· o·'·clock·."),
    ("falcon", "In 20245, it's <b>.", "In· ·202·45·,· it·'·s· ·<·b·>."),
    ("llama-bpe", "IT'S 20245 (x)\n\n y", "IT·'S· ·202·45· (·x·)\n\n· y"),
    ("qwen2", "IT'S 20245 (x)\n\n y", "IT·'S· ·2·0·2·4·5· (·x·)\n\n· y"),
    ("qwen2", "हिन्दी", "ह·िन·्द·ी"),
    ("qwen35", "हिन्दी", "हिन्दी"),
    ("gpt-4o", "camelCase XMLHttp don't a/b//\n", "camel·Case· XMLHttp· don't· a·/b·//\n"),
    ("tekken", "camelCase don't a//\n123", "camel·Case· don·'t· a·//\n·1·2·3"),
    ("deepseek-llm", "In 2024\n漢字かな don't", "In· ·2024·\n·漢字かな· don·'·t"),
    ("deepseek-coder", "In 2024\n漢字かな don't", "In· ·2·0·2·4·\n·漢字かな· don·'·t"),
    ("deepseek-v3", "x.append(1234)漢字 don't\n", "x·.append·(·123·4·)·漢字· don·'t·\n"),
    ("kimi-k2", "camelCase漢字 don't 1234", "camel·Case·漢字· don't· ·123·4"),
    ("bloom", "In 2024, it's (x). Yes", "In· 2024·,· it's· (·x·).· Yes"),
    ("viking", "In 2024, it's", "In· ·2·0·2·4·,· it's"),
    ("superbpe", "In 1234567 words", "In ·1·234·567· words"),
    ("tiny_aya", "1234567 camelCase", "1·234·567· camel·Case"),
    ("exaone-moe", "a new phrase, 12\n\n", "a new phrase·,· ·1·2·\n\n"),
    ("seed-coder", "x);\n\ny", "x·);·\n\n·y"),
    ("bailingmoe", "x\n\ny", "x·\n\n·y"),
    ("minicpm5", "a 12345", "a· ·123·45"),
    ("ufakzeka", "Ali'den", "Ali·'den"),
    ("laguna", "x);\n\ny", "x·);·\n\n·y"),
    ("youtu", "a한국어\uff0c漢字 12", "a·한국어·\uff0c·漢字· ·1·2"),
    ("jais-2", "a" + " " * 7 + "b", "a·    ·  · b"),
    ("spark2_5", "x;\n\n12345", "x·;·\n·\n·1·2·3·4·5"),
]  # fmt: skip


def pieces(pre: str, text: str) -> list[str]:
    steps = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(step["pattern"]["Regex"]), "isolated")
        for step in PRE_TOKENIZERS[pre].splits()
    ]
    found = tokenizers.pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    return [piece for piece, _ in found]


@pytest.mark.parametrize("pre", PUBLISHED)
def test_patterns_are_the_published_ones(pre):
    assert PRE_TOKENIZERS[pre].patterns == PUBLISHED[pre]


@pytest.mark.parametrize(("pre", "text", "expected"), PIECES)
def test_texts_are_split_as_the_family_does(pre, text, expected):
    assert "·".join(pieces(pre, text)) == expected


LLAMA = json.loads((Path(__file__).parent / "data/llama_splits.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A vocabulary with merges across words, so that ids show where a text is split."""
    path = tmp_path_factory.mktemp("vocabulary") / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LLAMA["tokens"])
    writer.add_token_types([1] * len(LLAMA["tokens"]))
    writer.add_token_merges(LLAMA["merges"])
    finish(writer)
    return dict(open_gguf(path).metadata)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_are_those_of_llama_cpp(metadata, pre):
    files = tokenizer_files(metadata | {"tokenizer.ggml.pre": pre})
    core = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text, by_ids in LLAMA["ids"].items():
        [expected] = [ids for ids, names in by_ids.items() if pre in names.split()]
        assert " ".join(map(str, core.encode(text, add_special_tokens=False).ids)) == expected
        assert core.decode(core.encode(text).ids) == text


def test_a_text_is_normalised_where_the_published_tokenizer_does(metadata):
    for how, pre in {how: pre for pre, how in PRE_TOKENIZERS.items()}.items():
        files = tokenizer_files(metadata | {"tokenizer.ggml.pre": pre})
        core = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        assert (core.encode("e\u0301").ids == core.encode("\u00e9").ids) is how.composed
    composed = {pre for pre, how in PRE_TOKENIZERS.items() if how.composed}
    assert composed >= {"qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "olmo", "mpt"}
