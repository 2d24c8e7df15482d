"""The tokenizer and chat template of a model."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from dflash_jax import encoding
from dflash_jax.chat_template import ChatFormat, Message, templates_of
from dflash_jax.config.fields import has_file
from dflash_jax.errors import CheckpointError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",  # of multimodal processors
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder of named templates


class Tokenizer:
    """A `tokenizer.json` and the chat template, if the model has one."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        template: str | None,
        specials: dict[str, str],
        tool_template: str | None = None,
    ):
        self.core = core
        self.template = template
        self.specials = specials  # bos_token and the like, for templates
        self.tool_template = tool_template  # for conversations with tools, if it is different
        self.shown: frozenset[int] = frozenset()  # special ids that decoding keeps
        self._showing: dict[tuple[str, ...], Tokenizer] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer | None":
        """Return the tokenizer of a model directory, or None if it has none.

        Raises:
          CheckpointError: a file cannot be read, or is a folder or a broken link.
        """
        more = directory.glob(f"{MORE_TEMPLATES}/*.jinja")
        paths = filter(has_file, (*(directory / name for name in FILES), *more))
        files = {path.relative_to(directory).as_posix(): path for path in paths}
        return cls.from_files(files, where=str(directory))

    @classmethod
    def from_files(cls, files: Mapping[str, str | Path], *, where: str) -> "Tokenizer | None":
        """Return the tokenizer of a model's files, or None without a tokenizer.json.

        Args:
          files: the files by name, each a path or its text.
          where: the model, for error messages.

        Raises:
          CheckpointError: a file cannot be read.
        """
        try:
            texts = {name: _text(file) for name, file in files.items() if _is_read(name)}
            if "tokenizer.json" not in texts:
                return None
            core = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
            settings = json.loads(texts.get("tokenizer_config.json", "{}"))
            template, with_tools = templates_of(texts, settings)
            specials = _specials(texts, settings)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(
                f"the tokenizer of {where} cannot be read ({error}); fetch its files again"
            ) from error
        return cls(core, template, specials, with_tools)

    @property
    def teaches(self) -> str | None:
        """The template that describes tools to the model, and so the syntax of tool calls."""
        return self.tool_template or self.template

    @property
    def size(self) -> int:
        """Number of ids; the embedding table of the model may be larger."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Return the ids of a text; `specials` adds the tokenizer's start token, if it has one."""
        return encoding.encode(self.core, well_formed(text), specials)

    def check_fits(self, text: str, max_tokens: int) -> None:
        """Check the length of a text without encoding it.

        A text that passes may still have more than `max_tokens` tokens.

        Raises:
          PromptTooLongError: the text has too many characters for `max_tokens` tokens.
        """
        encoding.check_characters(self.core, well_formed(text), max_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, except those of `showing`."""
        return self.core.decode(self.visible_ids(ids), skip_special_tokens=not self.shown)

    def raw(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens."""
        return self.core.decode(list(ids), skip_special_tokens=False)

    def raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, which may be part of a character; None if unknown."""
        text = self.raw([token])
        if "\ufffd" not in text:
            return text.encode()
        piece = self.core.id_to_token(token) or ""
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        known = _byte_letters()
        return bytes(known[c] for c in piece) if piece and set(piece) <= known.keys() else None

    def stream(self) -> "TextStream":
        """Return an incremental decoder."""
        return TextStream(self)

    def showing(self, texts: Iterable[str]) -> "Tokenizer":
        """Return this tokenizer with some special tokens kept in decoded text.

        Args:
          texts: texts that contain these tokens, such as the markers of a tool syntax.
        """
        key = tuple(texts)
        if key not in self._showing:
            shown = {i for i, text in self._special.items() if any(text in t for t in key)}
            copy = Tokenizer(self.core, self.template, self.specials, self.tool_template)
            self._showing[key] = copy
            copy.shown, copy._special = frozenset(shown), self._special
        return self._showing[key]

    def visible_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids without the special ones that decoding omits."""
        if not self.shown:
            return list(ids)
        return [i for i in ids if i not in self._special or i in self.shown]

    @property
    def special_texts(self) -> list[str]:
        """Texts of tokens that grammars treat as units: special ones, and tags like <think>."""
        known = self.core.get_added_tokens_decoder().values()
        return [t.content for t in known if t.special or re.fullmatch("<.*>", t.content)]

    @functools.cached_property
    def _special(self) -> dict[int, str]:
        known = self.core.get_added_tokens_decoder().items()
        return {i: token.content for i, token in known if token.special}

    def chat(self, messages: Sequence[Message], /, **variables: Any) -> list[int]:
        """Return the ids of a conversation before the assistant's next turn; see `render`."""
        return self.encode(self.render(messages, **variables), specials=False)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return a conversation in the chat template, up to the assistant's next turn.

        Args:
          messages: dicts with `role` and `content`, as in the OpenAI API; a content may be a
            list of texts, see `plain`.
          variables: passed to the template: `tools`, `enable_thinking`, ...

        Raises:
          RequestError: the model has no template, or the template raises an error.
        """
        return self._format.render(messages, **variables)

    def plain(self, message: Message) -> Message:
        """Return a message in the form that the template supports; see `ChatFormat.plain`."""
        return self._format.plain(message)

    @property
    def hides_content(self) -> bool:
        """Whether the chat template renders a user's message without its content."""
        return self._format.hides_content

    @functools.cached_property
    def _format(self) -> ChatFormat:
        return ChatFormat(self.template, self.tool_template, self.specials)


class TextStream:
    """Incremental detokenisation that returns whole characters only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = self._fresh()
        self._ids: list[int] = []
        self._held: list[int] = []  # ids without text so far
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids, and return the text that they complete."""
        new = "".join(map(self._step, self._tokenizer.visible_ids(ids)))
        self._ids += ids
        self.text += new
        return new

    def flush(self) -> str:
        """Return the rest of the text, with an incomplete character replaced."""
        whole = self._tokenizer.decode(self._ids)
        held = whole[len(self.text) :] if whole.startswith(self.text) else self._decoded_alone()
        self.text += held
        self._held = []
        return held

    def _step(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        self._held.append(token)
        try:
            new = self._stream.step(self._tokenizer.core, token) or ""
        except Exception:  # invalid bytes change earlier text
            new, self._stream = self._decoded_alone(), self._fresh()
        self._held = [] if new else self._held
        return new

    def _decoded_alone(self) -> str:
        return self._tokenizer.decode(self._held)

    def _fresh(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=not self._tokenizer.shown)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level vocabularies (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def well_formed(text: str) -> str:
    """Return a text with surrogate pairs joined and lone surrogates replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_read(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer."""
    return name in FILES or (Path(name).parent.name == MORE_TEMPLATES and name.endswith(".jinja"))


def _specials(texts: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens by their names in templates.

    Those of special_tokens_map.json are used if the settings do not list the added tokens.
    """
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **json.loads(texts.get("special_tokens_map.json", "{}"))}
    more = settings.get("extra_special_tokens")
    named = {**settings, **(more if isinstance(more, dict) else {})}
    tokens = {k: v for k, v in named.items() if k.endswith("_token")}
    plain = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {k: v for k, v in plain.items() if isinstance(v, str) and v}


def _text(file: str | Path) -> str:
    return file.read_text(encoding="utf-8") if isinstance(file, Path) else file
