"""Special tokens that messages spell: they are encoded as text, those of the template as tokens.

Before a conversation is rendered, each special token that a message spells is replaced by a mark.
In the rendered text, special tokens that are left are the template's own. So a text that somebody
else wrote, such as the result of a tool, cannot end its turn and begin another.
"""

import functools
import itertools
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

# Marks consist of digits, which templates do not trim, escape or write in other cases. Nobody who
# writes a message can guess them.
SECRET = f"{secrets.randbelow(10**24):024}"
OWN = f"{secrets.randbelow(10**24):024}"  # for the template's own tokens
DIGITS = 6  # after a secret: the number of the special token

Encode = Callable[[tokenizers.Tokenizer, str], list[int]]


class Spellings:
    """Marks what texts spell like the special tokens of one tokenizer."""

    def __init__(self, core: tokenizers.Tokenizer):
        self._core = core
        known = core.get_added_tokens_decoder()
        self._tokens = {t.content: i for i, t in known.items() if t.special and len(t.content) > 1}
        self._texts = list(self._tokens)
        self._numbers = {text: f"{n:0{DIGITS}}" for n, text in enumerate(self._texts)}
        specials = any_of(self._texts)
        self._pattern = re.compile(specials)
        self._either = re.compile(f"{SECRET}([0-9]{{{DIGITS}}})|({specials})")

    def marked(self, value: Any, kept: frozenset[str] = frozenset()) -> Any:
        """Return a JSON value with marks in its texts in place of special tokens.

        Args:
          kept: special tokens to leave as they are.
        """
        if isinstance(value, str):
            return self._pattern.sub(functools.partial(self._mark, kept), value)
        if isinstance(value, dict):
            return {self.marked(k, kept): self.marked(inner, kept) for k, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(inner, kept) for inner in value]
        return value

    @staticmethod
    def marks(text: str) -> bool:
        """Return whether a text has marks."""
        return SECRET in text

    def _mark(self, kept: frozenset[str], spelled: re.Match[str]) -> str:
        text = spelled[0]
        return text if text in kept else SECRET + self._numbers[text]

    def unmarked(self, text: str) -> str:
        """Return a text with special tokens in place of marks."""
        if not self.marks(text):
            return text
        return self._either.sub(lambda match: self._spelled(match) or match[0], text)

    def _spelled(self, match: re.Match[str]) -> str | None:
        """Return the special token of a mark; None for a special token."""
        if match[1] is None:
            return None
        return self._texts[int(match[1])] if int(match[1]) < len(self._texts) else match[0]

    def encode(self, text: str, encode: Encode) -> list[int]:
        """Return the ids of a text in which marks are the text that they stand for.

        Args:
          encode: returns the ids of a text by a tokenizer, without adding special tokens.
        """
        plain, meanings = self._plain
        ids = encode(plain, self._either.sub(self._renamed, text))
        return [meant for i in ids for meant in meanings.get(i, (i,))]

    def _renamed(self, match: re.Match[str]) -> str:
        """Return the text of a mark, or the name of a special token for `_without_specials`."""
        text = self._spelled(match)
        return OWN + self._numbers[match[2]] if text is None else text

    @functools.cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[int, tuple[int, ...]]]:
        """A tokenizer that knows special tokens by other names, and what its ids stand for.

        It has the same model, which is not copied. One pass encodes the whole text, so that the
        tokens next to a special one are the same as those of the tokenizer itself.
        """
        core = self._core
        plain = tokenizers.Tokenizer(core.model)
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(core, step) is not None:
                setattr(plain, step, getattr(core, step))
        known = core.get_added_tokens_decoder()
        names = {self._tokens[text]: OWN + number for text, number in self._numbers.items()}
        plain.add_tokens([_named(token, names.get(i)) for i, token in known.items()])
        meanings: dict[int, tuple[int, ...]] = {}
        for text, i in self._tokens.items():
            # A vocabulary may hold a special token as a word, too.
            letters = [j for c in text for j in plain.encode(c).ids]
            meanings[i] = tuple(j for j in letters if j not in names)
        for i, token in known.items():
            new = plain.token_to_id(names.get(i, token.content))
            if new is not None:
                meanings[new] = (i,)
        return plain, meanings


def _named(token: tokenizers.AddedToken, name: str | None) -> tokenizers.AddedToken:
    """Return an added token, under another name and not special if there is one."""
    return tokenizers.AddedToken(
        token.content if name is None else name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern that finds the longest of some texts, by their common beginnings."""
    words = sorted(set(texts))
    if not words:
        return "(?!)"
    rest = [word for word in words if word]
    groups = itertools.groupby(rest, key=lambda word: word[0])
    branches = [re.escape(first) + _tail(word[1:] for word in group) for first, group in groups]
    body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return body if len(rest) == len(words) else f"(?:{body})?"


def _tail(texts: Iterable[str]) -> str:
    words = list(texts)
    return any_of(words) if any(words) else ""
