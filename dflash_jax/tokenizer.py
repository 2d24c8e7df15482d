"""The tokenizer and chat template of a model; texts of any length block no other thread."""

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from dflash_jax.chat_template import ChatFormat, Message, templates_of
from dflash_jax.errors import CheckpointError, PromptTooLongError, RequestError
from dflash_jax.model_files import FILES, MORE_TEMPLATES, files_in
from dflash_jax.spellings import Spellings
from dflash_jax.tool_parsers import syntax_of
from dflash_jax.utils import interruption

# Encoding of texts of any length without blocking other threads.
#
# Encoding tens of millions of characters takes minutes and gigabytes. Texts that cannot fit are
# detected before encoding: a token covers at most as many characters as the longest entry of the
# vocabulary, and normalization shortens a text by at most a known factor. If a step is unknown, or
# may drop text, there is no bound, and the text is encoded.


LONG_TEXT = 20_000  # characters from which encoding releases the interpreter lock
COMPOSED = 4  # most characters that NFC and NFKC combine: the longest decomposition in Unicode
MOST_ALTERNATIVES = 256  # most alternatives of a pattern; trying more at every "<" is too slow
SAMPLE = 100  # characters of a text that show what a tokenizer puts around it
SLICE = 2**16  # characters to split at white space at once, with the interpreter lock held
LENGTHENING = {"Lowercase", "NFD", "NFKD", "ByteLevel", "Prepend"}  # normalizers
KEEPING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}
SPACE_DROPPING = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}

Part = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TokenBound:
    """Upper bound for the characters that a token covers.

    Attributes:
      characters: most characters of the text per token.
      spaces: whether white space counts; False if the tokenizer may drop it.
    """

    characters: int
    spaces: bool

    def min_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens of a text."""
        return -(-self.counted(text) // self.characters)

    def counted(self, text: str) -> int:
        """Return the number of characters that become part of a token for certain."""
        if self.spaces:
            return len(text)
        slices = (text[at : at + SLICE] for at in range(0, len(text), SLICE))
        return sum(sum(map(len, part.split())) for part in slices)


def encode(core: tokenizers.Tokenizer, text: str, specials: bool) -> list[int]:
    """Return the ids of a well-formed text; see `Tokenizer.encode`."""
    if len(text) < LONG_TEXT:
        return core.encode(text, add_special_tokens=specials).ids
    ids: list[int] = []
    for piece in [text] if specials else pieces_of(core, text, LONG_TEXT):
        interruption.check()
        # Unlike `encode`, the batch call releases the interpreter lock.
        ids += core.encode_batch_fast([piece], add_special_tokens=specials)[0].ids
    return ids


def check_characters(core: tokenizers.Tokenizer, text: str, max_tokens: int) -> None:
    """Check that a text's characters may fit into `max_tokens` tokens.

    Raises:
      PromptTooLongError: they do not.
    """
    if len(text) <= max_tokens or (bound := token_bound(core)) is None:
        return
    if (least := bound.min_tokens(text)) > max_tokens:
        raise PromptTooLongError(
            f"prompt is too long: {least} tokens > {max_tokens} maximum, at least: it has"
            f" {len(text)} characters, and a token of this model covers at most"
            f" {bound.characters}; shorten the prompt"
        )


@functools.lru_cache(maxsize=8)
def token_bound(core: tokenizers.Tokenizer) -> TokenBound | None:
    """Return the bound of a tokenizer, or None if there is none."""
    settings = json.loads(core.to_str())
    added = settings["added_tokens"]
    model = settings["model"]
    normalizers = list(_steps(settings["normalizer"], "normalizers"))
    splitters = list(_steps(settings["pre_tokenizer"], "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    if settings["truncation"] or not _covers(model, byte_level=byte_level):
        return None
    shrinks = [_shrink(step) for step in normalizers]
    if None in shrinks or not all(map(_keeps, splitters)):
        return None
    pieces = (*model["vocab"], *(token["content"] for token in added))
    characters = max(map(len, pieces), default=1) or 1
    for shrink in shrinks:
        characters *= shrink or 1
    dropping = {step["type"] for step in (*normalizers, *splitters)} & {*SPACE_DROPPING, "Strip"}
    spaces = not dropping and not any(token["lstrip"] or token["rstrip"] for token in added)
    return TokenBound(characters, spaces)


def _steps(part: Part | None, inner: str) -> Iterable[Part]:
    """Yield the steps of a normalizer or pre-tokenizer, with sequences flattened."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[inner]:
        yield from _steps(step, inner)


def _shrink(normalizer: Part) -> int | None:
    """Return the most characters that a normalizer makes one, or None if unknown."""
    kind = normalizer["type"]
    if kind in LENGTHENING or kind == "Strip":  # stripped white space is not counted
        return 1
    if kind in ("NFC", "NFKC"):  # decomposition never shortens
        return COMPOSED
    if kind == "Replace" and (old := normalizer["pattern"].get("String")):
        new = normalizer["content"]
        return -(-len(old) // len(new)) if new else None
    return None


def _keeps(splitter: Part) -> bool:
    """Whether a pre-tokenizer drops nothing but white space."""
    if splitter["type"] in SPACE_DROPPING:
        return True
    return splitter["type"] in KEEPING and splitter.get("behavior") != "Removed"


def _covers(model: Part, *, byte_level: bool) -> bool:
    """Whether every character becomes part of a token; none is dropped or merged as unknown."""
    if model["type"] != "BPE":  # others make an unknown word of any length one token
        return False
    vocabulary = model["vocab"]
    if byte_level:
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model["unk_token"] in vocabulary and not model["fuse_unk"]


def pieces_of(core: tokenizers.Tokenizer, text: str, least: int) -> Iterator[str]:
    """Cut a text into pieces whose concatenated ids are the ids of the text.

    The tokenizer first finds added tokens that are not normalized, and encodes the text between two
    of them separately. So a text may be cut in front of one.

    Args:
      least: least characters of a piece; the last one may have fewer.
    """
    begun = 0
    pattern, plain = _boundaries(core)
    for match in pattern.finditer(text) if plain else ():
        if match.start() - begun >= least and match.group() in plain:
            yield text[begun : match.start()]
            begun = match.start()
    yield text[begun:]


@functools.lru_cache(maxsize=8)
def _boundaries(core: tokenizers.Tokenizer) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return a pattern that finds added tokens as the tokenizer does, and those to cut before.

    The tokenizer takes the leftmost match, and the longest one there. No token is returned to cut
    before if the text after a cut may change the ids before it.
    """
    added = core.get_added_tokens_decoder().values()
    raw = sorted(
        (t for t in added if t.content and not t.normalized), key=lambda t: -len(t.content)
    )
    pattern = re.compile("|".join(re.escape(token.content) for token in raw))
    unsafe = core.truncation or core.padding or core.encode_special_tokens
    if unsafe or any(token.single_word for token in added) or len(raw) > MOST_ALTERNATIVES:
        return pattern, frozenset()
    return pattern, frozenset(token.content for token in raw if not token.lstrip)


MARKED = frozenset({"documents", "tools"})  # variables of templates that others may have written


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
          CheckpointError: a file cannot be read, or see `files_in`.
        """
        return cls.from_files(files_in(directory), where=str(directory))

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
        """Return the ids of a text, of which parts may be `marked`.

        Args:
          specials: add the tokenizer's start token, if it has one.
        """
        text = well_formed(text)
        if not self._spellings.marks(text):
            return encode(self.core, text, specials)
        ids = self._spellings.encode(text, functools.partial(encode, specials=False))
        if not specials:
            return ids
        begin = self._spellings.unmarked(text)[:SAMPLE]
        bare = encode(self.core, begin, specials=False)
        whole = encode(self.core, begin, specials=True)
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return [*whole[:at], *ids, *whole[at + len(bare) :]]

    def check_fits(self, text: str, max_tokens: int) -> None:
        """Check the length of a text without encoding it.

        A text that passes may still have more than `max_tokens` tokens.

        Raises:
          PromptTooLongError: the text has too many characters for `max_tokens` tokens.
        """
        check_characters(self.core, self._spellings.unmarked(well_formed(text)), max_tokens)

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

    def stream(self, end_ids: Collection[int] = ()) -> "TextStream":
        """Return an incremental decoder; see `TextStream`."""
        return TextStream(self, end_ids)

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
            copy.shown = frozenset(shown)
            copy._special = self._special
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

    @functools.cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self.core)

    def marked(self, value: Any) -> Any:
        """Return texts, tools or other JSON values, in which special tokens are text.

        `encode` does not take what is spelled like a special token for one, also in a larger text.
        """
        return self._spellings.marked(value)

    def marked_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in which special tokens are text, see `marked`.

        An assistant's text keeps those of its own thoughts and calls, which its output shows.
        """
        return [self._marked_message(message) for message in messages]

    def _marked_message(self, message: Message) -> Message:
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return self.marked(message)
        kept = self._own_markup
        return {
            key: self._spellings.marked(value, kept if key == "content" else frozenset())
            for key, value in message.items()
        }

    @functools.cached_property
    def _own_markup(self) -> frozenset[str]:
        """Special tokens of thoughts and calls, and those that the template looks for in a text.

        Those that are around a message of the user are not among them.
        """
        source = (self.template or "") + (self.tool_template or "")
        sought = [text for _, text in re.findall(r"split\((['\"])(.+?)\1", source)]
        if (syntax := syntax_of(self.teaches)) is not None:
            sought += [*syntax.opens, *syntax.closes]
            if (thought := syntax.thought) is not None:
                sought += [thought.opening, thought.closing]
        try:
            others = self.render([{"role": "user", "content": "."}], add_generation_prompt=False)
        except RequestError:
            others = ""
        specials = self._special.values()
        return frozenset(x for x in specials if x not in others and any(x in y for y in sought))

    def chat(
        self, messages: Sequence[Message], /, *, parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """Return the ids of a conversation before the assistant's next turn; see `render`.

        Args:
          parse_special: what messages, tools and documents spell like special tokens is taken for
            them, as if the template had written it.
        """
        render = self.render if parse_special else self.render_marked
        return self.encode(render(messages, **variables), specials=False)

    def render_marked(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return a conversation for `encode`, as `render` does, see `marked`."""
        others = {name: self.marked(variables[name]) for name in MARKED.intersection(variables)}
        return self.render(self.marked_messages(messages), **variables | others)

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
    """Incremental detokenisation that returns whole characters only.

    Args:
      end_ids: tokens that end the output. They are never text, special or not.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._stream = self._fresh()
        self._ids: list[int] = []
        self._held: list[int] = []  # ids without text so far
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids, and return the text that they complete."""
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
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
            new = self._decoded_alone()
            self._stream = self._fresh()
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
