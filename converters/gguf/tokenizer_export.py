"""Tokenizer and chat templates of Hugging Face files as GGUF metadata.

Byte-level BPE whose word pattern has a name in GGUF, and BPE over characters with byte tokens
(SentencePiece's, Gemma 4's) can be written. Facts from llama.cpp's converter and vocabulary code.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_jax.converters.formats.gguf.file import STRING
from dflash_jax.converters.formats.gguf.writer import BOOL, F32, I32, U32, Typed
from dflash_jax.converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from dflash_jax.converters.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from dflash_jax.errors import TokenizerError

Files = Mapping[str, str | Path]
# Patterns that steps of a tokenizer.json stand for: GPT-2's words, and digits.
BY_BYTES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
DIGITS = r"\p{N}+"
LOWEST = -1e9  # score of tokens that no merge forms
# Values of `tokenizer.ggml.model`.
GEMMA4 = "gemma4"
SENTENCEPIECE = "llama"
TEMPLATE = "tokenizer.chat_template"


def tokenizer_metadata(files: Files, vocab_size: int, *, gemma4: bool = False) -> dict[str, Typed]:
    """Return the metadata for a tokenizer.json and the files beside it.

    Args:
      files: Hugging Face files by name, as texts or paths.
      vocab_size: rows of the embedding table; ids without a token become padding.
      gemma4: whether a BPE over characters merges as Gemma 4's does.

    Raises:
      TokenizerError: the tokenizer has no form in GGUF, or is damaged.
    """
    core = _json(files, "tokenizer.json")
    settings = _json(files, "tokenizer_config.json")
    model = core.get("model") if isinstance(core.get("model"), dict) else {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise TokenizerError(
            f"a tokenizer of the type {model.get('type')!r} is not written to GGUF; BPE is"
        )
    tokens, kinds = _tokens(core, vocab_size)
    metadata = {
        "tokenizer.ggml.tokens": Typed(STRING, tokens),
        "tokenizer.ggml.token_type": Typed(I32, kinds),
    }
    if model.get("byte_fallback"):
        metadata |= _of_characters(core, tokens, gemma4=gemma4)
    else:
        metadata |= _of_bytes(core)
    return metadata | _special(core, settings, files, tokens) | _templates(settings, files)


def _json(files: Files, name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(_text(files[name]))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{name} cannot be read ({error}); fetch it again") from None
    return content if isinstance(content, dict) else {}


def _text(file: str | Path) -> str:
    return file.read_text(encoding="utf-8") if isinstance(file, Path) else file


def _tokens(core: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return text and kind of each id."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    model = core["model"]
    added = core.get("added_tokens") or []
    pairs = _merges(core) if model.get("byte_fallback") else ()
    made = {left + right for left, right in pairs}
    entries = [(text, i, NORMAL) for text, i in model["vocab"].items()]
    for token in added:
        text = str(token.get("content"))
        if text not in model["vocab"] and _beyond(token.get("id"), vocab_size):
            continue  # it belongs to multimodal models, like Gemma 3's mark of an image
        kind = CONTROL if token.get("special") else USER_DEFINED
        if kind == USER_DEFINED and SPACE in text and text in made:
            kind = NORMAL  # a run of spaces; of other kinds, llama.cpp would show the mark
        entries.append((text, token.get("id"), kind))
    for text, i, kind in entries:
        if not isinstance(text, str) or type(i) is not int or not 0 <= i < vocab_size:
            raise TokenizerError(
                f"the token {text!r} has the id {i!r}; the model has {vocab_size} tokens: give the"
                " tokenizer that belongs to it"
            )
        tokens[i] = text
        kinds[i] = kind
        if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            kinds[i] = BYTE
        if text == model.get("unk_token"):
            kinds[i] = UNKNOWN
    return tokens, kinds


def _beyond(i: Any, size: int) -> bool:
    return type(i) is int and i >= size


def _merges(core: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the parts of merges, which are lists or divided by a space."""
    pairs = []
    for merge in core["model"].get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2:
            raise TokenizerError(f"the merge {merge!r} is no pair of tokens; fetch the file again")
        pairs.append((str(parts[0]), str(parts[1])))
    return pairs


def _listed(merges: list[tuple[str, str]]) -> Typed:
    """Return merges as files list them."""
    if wrong := [pair for pair in merges if any(" " in part[1:] for part in pair)]:
        raise TokenizerError(
            f"the merge {list(wrong[0])!r} has no form in GGUF, where a space divides two"
        )
    return Typed(STRING, [" ".join(pair) for pair in merges])


def _of_bytes(core: dict[str, Any]) -> dict[str, Typed]:
    return {
        "tokenizer.ggml.model": Typed(STRING, "gpt2"),
        "tokenizer.ggml.pre": Typed(STRING, _named(core)),
        "tokenizer.ggml.merges": _listed(_merges(core)),
    }


def _named(core: dict[str, Any]) -> str:
    """Return the name of the patterns that split a text into words."""
    pre_tokenizer = core.get("pre_tokenizer")
    patterns = tuple(_patterns(pre_tokenizer))
    names = [name for name, known in PRE_TOKENIZERS.items() if known.patterns == patterns]
    if not names:
        raise TokenizerError(
            f"its word pattern has no name in GGUF; known are {', '.join(PRE_TOKENIZERS)}. It is"
            f" {json.dumps(pre_tokenizer)[:300]}"
        )
    composed = '"NFC"' in json.dumps(core.get("normalizer"))
    whole = bool(core["model"].get("ignore_merges"))

    def alike(name: str) -> int:
        known = PRE_TOKENIZERS[name]
        return [known.composed == composed, known.whole_words == whole].count(True)

    return max(names, key=alike)  # the first of the best


def _patterns(step: Any) -> Iterator[str]:
    """Yield the patterns of a pre-tokenizer; steps without one as JSON."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        for part in step.get("pretokenizers") or ():
            yield from _patterns(part)
    elif kind == "ByteLevel" and not step.get("add_prefix_space"):
        if step.get("use_regex", True):
            yield BY_BYTES
    elif kind == "Digits":
        yield DIGIT if step.get("individual_digits") else DIGITS
    elif kind == "Split" and _isolated(step):
        pattern = str(step["pattern"].get("Regex"))
        yield pattern.replace("\r", r"\r").replace("\n", r"\n")  # DeepSeek has the characters
    else:
        yield json.dumps(step)


def _isolated(split: dict[str, Any]) -> bool:
    """Return whether each match of a pattern becomes a word."""
    how = (split.get("behavior"), split.get("invert", False))
    return isinstance(split.get("pattern"), dict) and how in (
        ("Isolated", False),
        ("Removed", True),
    )


def _of_characters(core: dict[str, Any], tokens: list[str], *, gemma4: bool) -> dict[str, Typed]:
    """Return a BPE over characters; SentencePiece's merges follow from scores."""
    merges = _merges(core)
    before = '"Prepend"' in json.dumps(core.get("normalizer"))
    metaspace = core.get("pre_tokenizer")
    if isinstance(metaspace, dict) and metaspace.get("type") == "Metaspace":
        before = metaspace.get("prepend_scheme", "always") != "never"
    ranks: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, -float(rank))
    scores = [ranks.get(token, LOWEST) for token in tokens]
    metadata = {
        "tokenizer.ggml.model": Typed(STRING, GEMMA4 if gemma4 else SENTENCEPIECE),
        "tokenizer.ggml.pre": Typed(STRING, GEMMA4 if gemma4 else "default"),
        "tokenizer.ggml.scores": Typed(F32, scores),
        "tokenizer.ggml.add_space_prefix": Typed(BOOL, before),
    }
    if gemma4:
        metadata["tokenizer.ggml.merges"] = _listed(merges)
    return metadata


def _special(
    core: dict[str, Any], settings: dict[str, Any], files: Files, tokens: list[str]
) -> dict[str, Typed]:
    """Return ids of special tokens, and whether texts begin with one."""
    named = _json(files, "special_tokens_map.json") | settings
    ids = {text: i for i, text in reversed(list(enumerate(tokens)))}
    metadata: dict[str, Typed] = {}
    for theirs, ours in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        text = named.get(f"{theirs}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in ids:
            metadata[f"tokenizer.ggml.{ours}_token_id"] = Typed(U32, ids[text])
    first, last = _around(core.get("post_processor"))
    metadata["tokenizer.ggml.add_bos_token"] = Typed(BOOL, first is not None)
    if first is not None and first in ids:
        metadata["tokenizer.ggml.bos_token_id"] = Typed(U32, ids[first])
    if last is not None:
        metadata["tokenizer.ggml.add_eos_token"] = Typed(BOOL, True)
    return metadata


def _around(processor: Any) -> tuple[str | None, str | None]:
    """Return the special tokens that a post-processor puts before and after a text."""
    if not isinstance(processor, dict):
        return None, None
    for part in processor.get("processors") or [processor]:
        if part.get("type") == "TemplateProcessing":
            template = part.get("single") or [{}]
            ends = (template[0].get("SpecialToken"), template[-1].get("SpecialToken"))
            first, last = (end.get("id") if isinstance(end, dict) else None for end in ends)
            return first, last
    return None, None


def _templates(settings: dict[str, Any], files: Files) -> dict[str, Typed]:
    """Return chat templates: the default one, and others by name."""
    templates = settings.get("chat_template") or _json(files, "chat_template.json").get(
        "chat_template"
    )
    if "chat_template.jinja" in files:
        templates = _text(files["chat_template.jinja"])
    named = {"default": templates} if isinstance(templates, str) else {}
    if isinstance(templates, list):
        named = {entry["name"]: entry["template"] for entry in templates}
    for name in sorted(files):
        if name.endswith(".jinja") and "/" in name:
            named[Path(name).stem] = _text(files[name])
    metadata = {f"{TEMPLATE}.{k}": Typed(STRING, v) for k, v in named.items() if k != "default"}
    if metadata:
        metadata["tokenizer.chat_templates"] = Typed(STRING, [k for k in named if k != "default"])
    if "default" in named:
        metadata[TEMPLATE] = Typed(STRING, named["default"])
    return metadata
