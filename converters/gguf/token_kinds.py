"""Kinds of the tokens of a GGUF file: text, control tokens, bytes, and others."""

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
) -> list[int]:
    """Return token kinds with marks that start or end turns as control tokens, with a warning.

    As normal tokens they would be spelt in pieces wherever the chat template writes them.

    Args:
      named: ids that the file names as start or end tokens.
      template: text of the chat template.
    """

    def marks(i: int, token: str) -> bool:
        written = token[:2] in PIPES and token in template
        return (i in named or written) and MARK.fullmatch(token) is not None

    found = {i for i, token in enumerate(tokens) if kinds[i] == NORMAL and marks(i, token)}
    if found:
        listed = ", ".join(repr(tokens[i]) for i in sorted(found)[:5])
        warnings.warn(
            f"tokenizer.ggml.token_type says that {listed} are normal text; they are read as"
            " control tokens, since they mark turns",
            stacklevel=2,
        )
    return [CONTROL if i in found else kind for i, kind in enumerate(kinds)]
