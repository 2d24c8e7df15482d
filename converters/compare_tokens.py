"""Compare what two forms of a model make of texts: tokenizers, special ids, chat templates."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dflash_jax.config import TargetConfig
from dflash_jax.converters.gguf.tokenizer import PART_ENDS, STOP_TEXTS
from dflash_jax.converters.models import StoredModel
from dflash_jax.errors import TokenizerError
from dflash_jax.families import family
from dflash_jax.tokenizer import Tokenizer

# Texts that tokenizers of different families, normalisers and versions encode differently.
PROBES = (
    "Hello, world! It's 12345 o'clock, they'Re 3.14.",
    " a  b   c    d\te\t\tf\n\ng\r\n  h \n\n\n",
    "def f(x):\n    if x:\n        return x ** 2  # ok\n",
    "camelCase XMLHttp snake_case https://a.b/c?d=e&f",
    "na\u00efve fa\u00e7ade \u041f\u0440\u0438\u0432\u0435\u0442 \u6f22\u5b57 \u304b\u306a"
    " \ud55c\uad6d\uc5b4 \u0939\u093f \u0e44\u0e17\u0e22 \u2026 \u00bd",
    "\U0001f389 \U0001f469\u200d\U0001f680 e\u0301 \u00a0\u3000\u200b",
    "",
)
NAMED = ("bos_token", "unk_token")  # special tokens that answers depend on, besides end tokens
SHOWN = 3
T = TypeVar("T")


def differences(first: StoredModel, second: StoredModel) -> tuple[list[str], list[str]]:
    """Return what differs, and why something was not compared.

    Only models that both have a tokenizer are judged.

    Raises:
      CheckpointError: a tokenizer's files are damaged.
    """
    ours, our_reason = _tokenizer(first)
    theirs, their_reason = _tokenizer(second)
    if ours is None or theirs is None:
        reasons = [reason for reason in (our_reason, their_reason) if reason]
        return [], [f"tokenizers are not compared: {'; '.join(reasons)}"]
    size = min(getattr(model.config, "vocab_size", 1 << 31) for model in (first, second))
    problems = [
        *_tokens(ours, theirs, size),
        *_probes(ours, theirs),
        *_special(ours, theirs),
        *_ends((first, ours), (second, theirs)),
        *_templates(ours, theirs),
    ]
    return problems, []


def _tokenizer(model: StoredModel) -> tuple[Tokenizer | None, str]:
    """Return a model's tokenizer, or None and the reason why there is none."""
    try:
        files: Mapping[str, str | Path] = model.companions()
    except TokenizerError as error:
        return None, f"that of {model.path}: {error}"
    tokenizer = Tokenizer.from_files(files, where=str(model.path))
    if tokenizer is None:
        return None, f"{model.path} has none"
    return tokenizer, ""


def _tokens(ours: Tokenizer, theirs: Tokenizer, size: int) -> Iterator[str]:
    """Yield the first ids below `size` that stand for different texts."""
    texts = [
        {i: tokenizer.raw([i]) for i in tokenizer.core.get_vocab().values() if i < size}
        for tokenizer in (ours, theirs)
    ]
    unlike = sorted(
        i for i in texts[0].keys() | texts[1].keys() if texts[0].get(i) != texts[1].get(i)
    )
    if unlike:
        shown = [f"{i} is {texts[0].get(i)!r} against {texts[1].get(i)!r}" for i in unlike[:SHOWN]]
        yield f"{len(unlike)} tokens: {', '.join(shown)}"


def _probes(ours: Tokenizer, theirs: Tokenizer) -> Iterator[str]:
    """Yield the first texts that have different ids."""
    marks = "".join(itertools.islice(ours.special_texts, 8))
    pairs = [(text, ours.encode(text), theirs.encode(text)) for text in (*PROBES, marks)]
    unlike = [pair for pair in pairs if pair[1] != pair[2]]
    for text, one, other in unlike[:SHOWN]:
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
        yield f"ids of {text!r}: {_part(one, at)} against {_part(other, at)} from token {at}"


def _part(ids: Sequence[int], at: int) -> str:
    return ", ".join(map(str, ids[at : at + SHOWN])) or "nothing"


def _special(ours: Tokenizer, theirs: Tokenizer) -> Iterator[str]:
    """Yield special tokens that both name, and that differ."""
    for name in NAMED:
        one, other = (tokenizer.specials.get(name) for tokenizer in (ours, theirs))
        if one and other and one != other:
            yield f"{name}: {one!r} against {other!r}"


def _ends(first: tuple[StoredModel, Tokenizer], second: tuple[StoredModel, Tokenizer]) -> list[str]:
    """Return the end tokens if they differ, those that families are known to use aside."""
    one, other = (_other_ends(*each) for each in (first, second))
    return [f"end tokens: {sorted(one)} against {sorted(other)}"] if one != other else []


def _other_ends(model: StoredModel, tokenizer: Tokenizer) -> set[int]:
    """Return a target's end tokens and those that its family is known to use."""
    config = model.config
    if not isinstance(config, TargetConfig):
        return set()
    gguf = family(config.model_type).gguf
    architectures = gguf.architectures if gguf is not None else ()
    known = {text for name in architectures for text in STOP_TEXTS.get(name, ())}
    parts = {text for name in architectures for text in PART_ENDS.get(name, ())}
    ids = {text: tokenizer.core.token_to_id(text) for text in known | parts}
    ends = {*config.eos_token_ids, *(ids[text] for text in known)}
    return {i for i in ends - {ids[text] for text in parts} if i is not None}


def _templates(ours: Tokenizer, theirs: Tokenizer) -> Iterator[str]:
    """Yield chat templates that differ; a line end at their end means nothing."""
    for name in ("template", "tool_template"):
        one, other = ((getattr(t, name) or "").rstrip("\n") for t in (ours, theirs))
        if one != other:
            at = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
            parts = (repr(text[at : at + 40]) for text in (one, other))
            yield f"chat {name.replace('_', ' ')} from character {at}: {' against '.join(parts)}"
