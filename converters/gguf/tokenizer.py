"""Tokenizer, chat template and stop tokens from GGUF metadata, as Hugging Face files.

Byte-level BPE, Gemma 4's BPE over characters and SentencePiece's are rebuilt; other kinds are
refused. Facts from llama.cpp's vocabulary code and published tokenizer.json files.
"""

import contextlib
import hashlib
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.converters.formats.gguf.file import STRING, GgufArray
from dflash_jax.converters.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from dflash_jax.errors import CheckpointError, TokenizerError
from dflash_jax.utils.store import default_store

KEPT = "tokenizers"  # folder of rebuilt tokenizers
MOST_BYTES = 2**28  # all files of the folder together

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

    turn_marks = {i for i, token in enumerate(tokens) if kinds[i] == NORMAL and marks(i, token)}
    if not turn_marks:
        return list(kinds), ""
    listed = ", ".join(repr(tokens[i]) for i in sorted(turn_marks)[:5])
    note = (
        f"tokenizer.ggml.token_type says that {listed} are normal text; they are read as control"
        " tokens, since they mark turns"
    )
    return [CONTROL if i in turn_marks else kind for i, kind in enumerate(kinds)], note


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
# Added tokens of Phi-3 after which white space stays.
KEEPING_SPACES = ("<unk>", "<s>", "<|endoftext|>")


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
    ids = [i for i in named if type(i) is int]
    family = str(metadata.get("general.architecture"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    if family in STOP_TEXTS and isinstance(tokens, GgufArray):
        texts = tokens.tolist()
        wanted = set(STOP_TEXTS[family])
        parts = PART_ENDS.get(family, ())
        ids += [i for i, token in enumerate(texts) if token in wanted]
        ids = [i for i in ids if not (0 <= i < len(texts) and texts[i] in parts)]
    return tuple(dict.fromkeys(ids))


def _core(metadata: Mapping[str, Any]) -> str:
    """Return the text of tokenizer.json, which takes seconds for 262,000 tokens, and is kept."""
    store = default_store(KEPT, ".json", size=MOST_BYTES)
    key = _digest(metadata)
    if store is not None and (kept := store.get(key)):
        return kept.decode()
    core, note = _rebuilt(metadata)
    text = json.dumps(core)
    if note:
        warnings.warn(note, stacklevel=4)
    elif store is not None:
        with contextlib.suppress(OSError):  # as on a full disk
            store.put(key, [text.encode()])
    return text


def _digest(metadata: Mapping[str, Any]) -> str:
    """Return the digest of all that decides how a tokenizer is rebuilt, this code included."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for key, value in sorted(metadata.items()):
        if key.startswith(("tokenizer.", "general.")):
            listed = isinstance(value, GgufArray)
            digest.update(repr((key, len(value) if listed else value)).encode())
            if listed:
                digest.update(value.raw)
    return digest.hexdigest()


def _rebuilt(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return tokenizer.json, and a warning or nothing."""
    kind = metadata["tokenizer.ggml.model"]
    pre = metadata.get("tokenizer.ggml.pre")
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
    gemma = metadata["tokenizer.ggml.model"] == "gemma4"
    whole = kinds
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
    ids = {t: i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k != UNUSED}
    if len(ids) + kinds.count(UNUSED) != len(tokens):
        raise CheckpointError("two tokens of the vocabulary are equal; fetch the file again")
    return ids


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
        left = line[:space]
        right = line[space + 1 :]
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
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, ours in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        i = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(i) is int and 0 <= i < len(texts):
            settings[f"{ours}_token"] = texts[i]
    settings["add_bos_token"] = _starts(metadata)
    template = _template(metadata)
    if template:
        settings["chat_template"] = template
    return settings


def _template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if not named:
        return default if isinstance(default, str) else None
    every = ({"default": default} if isinstance(default, str) else {}) | named
    return [{"name": k, "template": v} for k, v in every.items() if isinstance(v, str)]
