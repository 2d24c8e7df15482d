"""Text to token ids and back, and the chat template of a model directory."""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from dflash_jax import encoding
from dflash_jax.chat_template import Message, calls_of, one_call_each, rendered, templates_of
from dflash_jax.config.fields import has_file
from dflash_jax.errors import CheckpointError, RequestError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",  # of a processor, which has the tokenizer of models that see
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder of others, by name


class Tokenizer:
    """A `tokenizer.json` and, where the model has one, its chat template."""

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
        self.tool_template = tool_template  # of conversations with tools, where it is another
        self.shown: frozenset[int] = frozenset()  # special ids whose text is part of the output
        self._showing: dict[tuple[str, ...], Tokenizer] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer | None":
        """The tokenizer of a model directory, or None if it ships none.

        Raises:
          CheckpointError: a file cannot be read, or is none, such as a folder or a broken link.
        """
        more = directory.glob(f"{MORE_TEMPLATES}/*.jinja")
        paths = filter(has_file, (*(directory / name for name in FILES), *more))
        found = {path.relative_to(directory).as_posix(): path for path in paths}
        return cls.from_files(found, where=str(directory))

    @classmethod
    def from_files(cls, files: Mapping[str, str | Path], *, where: str) -> "Tokenizer | None":
        """The tokenizer of a model's files by name, each a path or its text.

        Raises:
          CheckpointError: the files exist but cannot be read.
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
        """The template that shows a model its tools, and so how calls are written."""
        return self.tool_template or self.template

    @property
    def size(self) -> int:
        """Number of known ids; a model's table may be larger."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Ids of a text; `specials` adds the start token where the tokenizer asks for one."""
        return encoding.encode(self.core, well_formed(text), specials)

    def check_fits(self, text: str, max_tokens: int) -> None:
        """Raise PromptTooLongError if the text's characters alone show that it has more tokens.

        This takes no encoding. A text that passes may still have more tokens than `max_tokens`.
        """
        encoding.check_characters(self.core, well_formed(text), max_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out but for those of `showing`."""
        return self.core.decode(self.outward(ids), skip_special_tokens=not self.shown)

    def raw(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens written out."""
        return self.core.decode(list(ids), skip_special_tokens=False)

    def raw_bytes(self, token: int) -> bytes | None:
        """The bytes a token stands for, which may be a part of a character; None if unknown."""
        text = self.raw([token])
        if "\ufffd" not in text:
            return text.encode()
        piece = self.core.id_to_token(token) or ""
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        known = _byte_letters()
        return bytes(known[c] for c in piece) if piece and set(piece) <= known.keys() else None

    def stream(self) -> "TextStream":
        """A decoder that is fed ids as they come."""
        return TextStream(self)

    def showing(self, texts: Iterable[str]) -> "Tokenizer":
        """The same tokenizer, but these special tokens are not left out of decoded text.

        Args:
          texts: texts that contain them, such as the markers of a tool syntax.
        """
        key = tuple(texts)
        if key not in self._showing:
            shown = {i for i, text in self._special.items() if any(text in t for t in key)}
            made = Tokenizer(self.core, self.template, self.specials, self.tool_template)
            self._showing[key] = made
            made.shown, made._special = frozenset(shown), self._special
        return self._showing[key]

    def outward(self, ids: Sequence[int]) -> list[int]:
        """The ids that have a text for the outside: all but special ones that are not shown."""
        if not self.shown:
            return list(ids)
        return [i for i in ids if i not in self._special or i in self.shown]

    @property
    def special_texts(self) -> list[str]:
        """Texts that are tokens of their own in a grammar: special ones, and tags like <think>."""
        known = self.core.get_added_tokens_decoder().values()
        return [t.content for t in known if t.special or re.fullmatch("<.*>", t.content)]

    @functools.cached_property
    def _special(self) -> dict[int, str]:
        known = self.core.get_added_tokens_decoder().items()
        return {i: token.content for i, token in known if token.special}

    def chat(self, messages: Sequence[Message], /, **variables: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's next turn; arguments as `render`."""
        return self.encode(self.render(messages, **variables), specials=False)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Text of a conversation by the chat template, ready for the assistant's next turn.

        Args:
          messages: dicts with `role` and `content`, as in the OpenAI API; a content may be a
            list of texts, see `plain`.
          variables: passed to the template: `tools`, `enable_thinking`, ...

        Raises:
          RequestError: the model has no template, or the template refuses the messages.
        """
        if wrong := [m for m in messages if not isinstance(m, dict)]:
            raise RequestError(
                f"a message is {wrong[0]!r}; expected dicts, such as"
                ' {"role": "user", "content": "..."}'
            )
        plain = [self.plain(message) for message in messages]
        if any(len(calls_of(message)) > 1 for message in plain) and self._takes_one_call:
            plain = [self.plain(message) for message in one_call_each(plain)]
        return self._rendered(plain, **variables)

    def plain(self, message: Message) -> Message:
        """The message as the template reads it.

        A content that is a list of texts, or of parts of type text, becomes a text. They are joined
        as the template joins them; by a newline, as other servers do it, where the template reads
        no lists. Tool calls without a content get an empty one where the template needs a text.
        """
        content = message.get("content")
        if not content and message.get("tool_calls"):
            return self._wordless(message)
        if not isinstance(content, list):
            return message
        parts = (part.get("text") if isinstance(part, dict) else part for part in content)
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) < len(content):
            return message
        return message | {"content": self._between.join(texts)}

    def _wordless(self, message: Message) -> Message:
        """A turn that only calls tools; its thought, too, by the name that gpt-oss has for it."""
        thought = message.get("reasoning_content")
        if thought and "message.thinking" in (self.teaches or ""):
            message = message | {"thinking": thought}
        return message if message.get("content") == "" else message | {"content": self._nothing}

    @functools.cached_property
    def _nothing(self) -> str | None:
        """The content of a turn that has none: None, or "" where None is refused or written out."""

        def harm(content: str | None) -> float:
            text = self._with_calls(content, ["."])
            return math.inf if text is None else text.count("None")

        return "" if harm("") < harm(None) else None

    @functools.cached_property
    def _takes_one_call(self) -> bool:
        """Whether a turn with a call is written, and one with two is refused or half left out."""
        first, second = "first-value", "second-value"
        alone, both = (
            self._with_calls(self._nothing, values, answered=True) or ""
            for values in ([first], [first, second])
        )
        return first in alone and not (first in both and second in both)

    def _with_calls(
        self, content: str | None, values: Sequence[str], *, answered: bool = False
    ) -> str | None:
        """A conversation whose last turn calls a tool with each value; None if it is refused."""
        function = {"name": "f", "description": "", "parameters": {"type": "object"}}
        calls = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": "f"} | {"arguments": a}}
            for i, a in enumerate({"k": value} for value in values)
        ]
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "."} for c in calls]
        talk = [{"role": "user", "content": "."}, turn, *(answers if answered else ())]
        try:
            return self._rendered(talk, tools=[{"type": "function", "function": function}])
        except RequestError:
            return None

    @functools.cached_property
    def _between(self) -> str:
        """What stands between two parts of a text."""
        first, second = "\ue000", "\ue001"
        parts = [{"type": "text", "text": text} for text in (first, second)]
        try:
            text = self._rendered([{"role": "user", "content": parts}])
        except RequestError:
            return "\n"
        between, found, _ = text.partition(first)[2].partition(second)
        return between if found and not between.strip() else "\n"

    def _rendered(self, messages: Sequence[Message], /, **variables: Any) -> str:
        if self.template is None:
            raise RequestError(
                "this model ships no chat template; give a plain text or token ids instead"
            )
        unsaid = {"add_generation_prompt": True, "tools": None, "documents": None}
        variables = unsaid | self.specials | variables
        template = (variables["tools"] and self.tool_template) or self.template
        return rendered(template, variables | {"messages": messages})


class TextStream:
    """Incremental detokenisation; never gives half a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = self._fresh()
        self._ids: list[int] = []
        self._held: list[int] = []  # ids that gave no text yet
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text these ids complete."""
        new = "".join(map(self._step, self._tokenizer.outward(ids)))
        self._ids += ids
        self.text += new
        return new

    def flush(self) -> str:
        """What an unfinished character leaves behind."""
        whole = self._tokenizer.decode(self._ids)
        held = whole[len(self.text) :] if whole.startswith(self.text) else self._decoded_alone()
        self.text += held
        self._held = []
        return held

    def _step(self, token: int) -> str:
        """The text that a token completes."""
        self._held.append(token)
        try:
            new = self._stream.step(self._tokenizer.core, token) or ""
        except Exception:  # bytes that are no text change what was decoded before them
            new, self._stream = self._decoded_alone(), self._fresh()
        self._held = [] if new else self._held
        return new

    def _decoded_alone(self) -> str:
        return self._tokenizer.decode(self._held)

    def _fresh(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=not self._tokenizer.shown)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def well_formed(text: str) -> str:
    """The text with halves of surrogate pairs joined, and replaced where the other is missing."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_read(name: str) -> bool:
    """Whether a file of this name beside a model belongs to its tokenizer."""
    return name in FILES or (Path(name).parent.name == MORE_TEMPLATES and name.endswith(".jinja"))


def _specials(texts: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates have for them.

    Those of the older file count where the settings do not list the added tokens.
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
