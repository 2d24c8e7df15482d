"""Change the metadata of a GGUF file, in place where that cannot damage it, else by a copy.

A change in place is one write within one page of memory, which a killed process has made or not;
tensors stay where they are. All else would be damaged in between for whoever reads the file.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.converters.formats.gguf.file import (
    MAX_KEY,
    SCALARS,
    STRING,
    GgufArray,
    GgufFile,
    Shard,
    open_gguf,
    parse_metadata,
    round_up,
)
from dflash_jax.converters.formats.gguf.writer import (
    BOOL,
    F32,
    I32,
    I64,
    KIND_NAMES,
    KINDS,
    U32,
    U64,
    PlannedBlocks,
    Typed,
    head_bytes,
    stored_keys,
    write_gguf,
)
from dflash_jax.converters.formats.source import trim_mapped_memory
from dflash_jax.converters.gguf.tokenizer_export import TEMPLATE
from dflash_jax.converters.kept_metadata import VOCABULARY
from dflash_jax.converters.models import of_gguf
from dflash_jax.errors import CheckpointError, ConfigError, DFlashError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.atomic import flush, lock, new_path

PAGE = 4096  # bytes that a write changes as a whole, or not at all
BLOBS = "blobs"  # folders of download caches, whose files are named by their digests
LAYOUT = ("general.alignment", "split.")  # beginnings of keys that say how files are laid out
TOKEN_ID = "tokenizer.ggml.{}_token_id"
# Special tokens by the names that llama.cpp's tools give them, and others in use.
SPECIAL = {name: TOKEN_ID.format(name) for name in str.split("""
    bos eos eot eom unknown seperator padding cls mask prefix suffix middle
    fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep
""")}  # fmt: skip
SPECIAL |= {
    "unk": SPECIAL["unknown"],
    "pad": SPECIAL["padding"],
    "sep": SPECIAL["seperator"],
    "separator": SPECIAL["seperator"],
}
# Types before a value, as in llama.cpp's KEY=TYPE:VALUE; "int" and "float" have any width.
PREFIX = re.compile(rf"({'|'.join((*KINDS, 'int', 'float'))}):(.*)", re.DOTALL)
FLOAT_KINDS = (F32, KINDS["f64"])
SHOWN = 60  # characters of a value
HELLO = [{"role": "user", "content": "Hello"}]
# A tokenizer of one word, for a template whose model's own would take seconds to read.
ONE_WORD = json.dumps({
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
})  # fmt: skip


@dataclass(frozen=True)
class Changes:
    """Changes of metadata: keys to remove, then values to set, as texts or with their types."""

    values: Mapping[str, str | Typed] = dataclasses.field(default_factory=dict)
    # Pairs of a special token's name and its text, or its id.
    token_texts: Sequence[Sequence[str]] = ()
    token_ids: Sequence[Sequence[str]] = ()
    removed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return any((self.values, self.token_texts, self.token_ids, self.removed))


def edit(
    path: Path,
    changes: Changes,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[str, int], object] = lambda name, weights: None,
) -> dict[str, Any]:
    """Change the metadata of a GGUF file, or of the first of a set; return what was changed.

    Args:
      output: a new file that gets the changes; by default the file itself.

    Raises:
      CheckpointError: the file is damaged, in a cache, or cannot be written.
      ConfigError: a key or value is wrong, or the model could not be used any more.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder, whose metadata are texts: edit its config.json,"
            " tokenizer_config.json and chat_template.jinja"
        )
    with _locked(path, writes=output is None and not dry_run):
        source = open_gguf(path)
        if output is not None and len(source.shards) > 1:
            raise ConfigError(
                f"{path} is the first of a set of {len(source.shards)} files, which a copy of it"
                " alone would not find; leave --output out, or `merge` the set first"
            )
        before = stored_keys(source.shards[0].header)
        after = _changed(before, changes, path)
        report = {"path": str(path), "changes": _listed(before, after)}
        if not report["changes"]:
            return report | {"written": "nothing", "bytes": 0}
        _check(source, before, after)
        patch = _patch(source.shards[0], after) if output is None else None
        how = "in place" if patch else "a copy"
        size = len(patch[1]) if patch else _size(source.shards[0], after)
        if not dry_run:
            if patch:
                _write_inside(path, *patch)
            else:
                _write_copy(source.shards[0], after, output or path, overwrite, progress)
        return report | {"written": how, "bytes": size}


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as text."""
    if report["written"] == "nothing":
        return ["nothing changes: the file has these values"]
    changes = [f"{x['key']}: {x['before']} -> {x['after']}" for x in report["changes"]]
    how = "in the file itself" if report["written"] == "in place" else "by a copy of the file"
    return [*changes, f"{report['bytes']} bytes {how}"]


# Values.


def _changed(before: Mapping[str, Typed], changes: Changes, path: Path) -> dict[str, Typed]:
    """Return the metadata with the changes."""
    if missing := [key for key in changes.removed if key not in before]:
        raise ConfigError(f"{path} has no key {missing[0]!r}{_like(missing[0], before)}")
    after = {key: value for key, value in before.items() if key not in set(changes.removed)}
    wanted: dict[str, str | Typed] = dict(changes.values)
    for key, value in _special_tokens(changes, before, path):
        if key in wanted:
            raise ConfigError(f"{key} is given twice; leave one out")
        wanted[key] = value
    for key in (*changes.removed, *wanted):
        _check_key(key, path)
    for key, value in wanted.items():
        after[key] = value if isinstance(value, Typed) else parsed(key, value, after.get(key))
        _check_id(key, after[key], after, path)
    return after


def _like(key: str, known: Mapping[str, Any]) -> str:
    last = key.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last]
    return f"; did you mean {near[0]}?" if near else "; `inspect` lists its keys"


def _check_key(key: str, path: Path) -> None:
    if not key or not key.isprintable() or len(key.encode(errors="replace")) > MAX_KEY:
        raise ConfigError(f"the key {key[:SHOWN]!r} is empty, unprintable or too long")
    if key.startswith(LAYOUT):
        raise ConfigError(
            f"{key} says how {path} is laid out, and is not edited; use `split` or `merge`"
        )
    if key in VOCABULARY:
        raise ConfigError(
            f"{key} belongs to the vocabulary, and is not edited; `convert --tokenizer DIR` writes"
            " another tokenizer"
        )


def _special_tokens(
    changes: Changes, before: Mapping[str, Typed], path: Path
) -> Iterator[tuple[str, Typed]]:
    """Yield the keys of special tokens that are to change, with their ids."""
    for name, text in changes.token_texts:
        yield _special(name), Typed(U32, _id_of(text, before, path))
    for name, number in changes.token_ids:
        if not number.isascii() or not number.isdecimal():
            raise ConfigError(f"the id of {name} is {number!r}; expected a whole number from 0")
        key = _special(name)
        yield key, Typed(U32, _scalar(key, number, U32))


def _special(name: str) -> str:
    """Return the key of a special token."""
    if name.lower() not in SPECIAL:
        raise ConfigError(f"{name!r} is no special token; known are {', '.join(SPECIAL)}")
    return SPECIAL[name.lower()]


def _id_of(text: str, metadata: Mapping[str, Typed], path: Path) -> int:
    """Return the id of a token by its text."""
    tokens = _tokens(metadata)
    if tokens is None:
        raise ConfigError(f"{path} has no vocabulary to find {text!r} in; give the token's id")
    every = tokens.tolist()
    if text not in every:
        raise ConfigError(
            f"{path} has no token {text!r}; give its text as in the vocabulary, or its id"
        )
    return every.index(text)


def _tokens(metadata: Mapping[str, Typed]) -> GgufArray | None:
    entry = metadata.get("tokenizer.ggml.tokens")
    tokens = entry.value if entry is not None else None
    return tokens if isinstance(tokens, GgufArray) and tokens.kind == STRING else None


def _check_id(key: str, value: Typed, metadata: Mapping[str, Typed], path: Path) -> None:
    tokens = _tokens(metadata)
    if not re.fullmatch(TOKEN_ID.format(r"\w+"), key) or tokens is None:
        return
    if type(value.value) is not int or not 0 <= value.value < len(tokens):
        raise ConfigError(
            f"{key} is {value.value!r}; {path} has {len(tokens)} tokens, numbered from 0"
        )


def parsed(key: str, text: str, before: Typed | None) -> Typed:
    """Return a value from its text, with the type that the key has, or one that fits the text.

    Raises:
      ConfigError: the text is no value of that type.
    """
    match = PREFIX.fullmatch(text)
    named = match[1] if match else ""
    body = match[2] if match else text
    if before is not None:
        return _of_kind(key, body, named, before)
    if named in KINDS:
        return Typed(KINDS[named], _scalar(key, body, KINDS[named]))
    value = _json(body)
    if named == "float":
        return Typed(F32, _scalar(key, body, F32))
    if named == "int" or type(value) is int:
        return _whole(key, body)
    if isinstance(value, list):
        return _array(key, value)
    if isinstance(value, bool | float) and not (isinstance(value, float) and not _finite(value)):
        return Typed(BOOL if isinstance(value, bool) else F32, value)
    return Typed(STRING, _scalar(key, body, STRING))


def _of_kind(key: str, body: str, named: str, before: Typed) -> Typed:
    """Return a value of the type that a key has."""
    kind = before.kind
    many = isinstance(before.value, GgufArray | list)
    fits = {"int": kind not in (STRING, BOOL, *FLOAT_KINDS), "float": kind in FLOAT_KINDS}
    if named and (many or not fits.get(named, KINDS.get(named) == kind)):
        stored = f"an array of {KIND_NAMES[kind]}" if many else KIND_NAMES[kind]
        raise ConfigError(
            f"{key} is {stored} in this file and not {named}; to give it another type, add"
            f" --remove {key}"
        )
    if not many:
        return Typed(kind, _scalar(key, body, kind))
    value = _json(body)
    if not isinstance(value, list):
        raise ConfigError(
            f'{key} is an array; expected a JSON list such as ["a", "b"], not {body[:SHOWN]!r}'
        )
    return Typed(kind, [_scalar(key, _as_text(x), kind) for x in value])


def _array(key: str, values: list[Any]) -> Typed:
    """Return a list of JSON as an array of one type."""
    kinds = {type(value) for value in values}
    if not values or (len(kinds) > 1 and kinds != {int, float}):
        raise ConfigError(f"{key} is {values!r}; expected a list of values of one type")
    kind = {str: STRING, bool: BOOL, int: I32}.get(kinds.pop(), F32) if len(kinds) == 1 else F32
    if kind == I32 and not all(-(1 << 31) <= value < 1 << 31 for value in values):
        kind = I64
    return Typed(kind, [_scalar(key, _as_text(value), kind) for value in values])


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _finite(value: float) -> bool:
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return math.isfinite(value)


def _whole(key: str, text: str) -> Typed:
    """Return a whole number in the first type that holds it."""
    for kind in (U32, I32, U64, I64):
        with contextlib.suppress(ConfigError):
            return Typed(kind, _scalar(key, text, kind))
    raise ConfigError(f"{key} is {text[:SHOWN]!r}; expected a whole number of at most 64 bits")


def _scalar(key: str, text: str, kind: int) -> Any:
    """Return a value of one type from its text."""
    if kind == STRING:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the value of {key} is not UTF-8") from None
        return text
    wrong = ConfigError(
        f"{key} is {text[:SHOWN]!r}; expected a value of the type {KIND_NAMES[kind]}"
    )
    if kind == BOOL:
        if text.lower() not in ("true", "false", "0", "1"):
            raise wrong
        return text.lower() in ("true", "1")
    try:
        value = float(text) if kind in FLOAT_KINDS else int(text)
        struct.pack(SCALARS[kind], value)
    except (ValueError, OverflowError, struct.error):
        raise wrong from None
    if not math.isfinite(value):
        raise wrong
    return value


def template_of(path: Path) -> str:
    """Return the chat template in a .jinja file, or in the JSON of a tokenizer's settings.

    Raises:
      ConfigError: it cannot be read, or has none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a text file") from None
    if path.suffix.lower() != ".json":
        return text
    fields = _json(text)
    template = fields.get("chat_template") if isinstance(fields, dict) else None
    if not isinstance(template, str):
        raise ConfigError(f"{path} has no chat_template that is a text; give a .jinja file")
    return template


# Whether the result is a model.


def _check(source: GgufFile, before: Mapping[str, Typed], after: Mapping[str, Typed]) -> None:
    """Check that the new metadata can be used if the old could.

    Raises:
      ConfigError: they cannot.
    """
    shard = source.shards[0]
    for key, value in after.items():
        if key.startswith(TEMPLATE) and value != before.get(key) and key != f"{TEMPLATE}s":
            _check_template(key, value, source.path)
    raw = head_bytes(after, _planned(shard), shard.header.alignment, shard.header.version)
    values = parse_metadata(raw, str(source.path))
    header = dataclasses.replace(shard.header, metadata=values)
    changed = GgufFile([dataclasses.replace(shard, header=header), *source.shards[1:]])
    if problem := _problem(changed):
        if _problem(source):
            return
        raise ConfigError(f"with these changes the model could not be used any more: {problem}")


def _problem(source: GgufFile) -> str:
    """Return why a file's model cannot be used, or ""."""
    try:
        of_gguf(source).check()
    except DFlashError as error:
        return str(error)
    return ""


def _check_template(key: str, value: Typed, path: Path) -> None:
    """Check that a chat template renders a message."""
    if value.kind != STRING or not isinstance(value.value, str) or not value.value.strip():
        raise ConfigError(f"{key} is empty or no text; to take it away, give --remove {key}")
    files = {
        "tokenizer.json": ONE_WORD,
        "tokenizer_config.json": json.dumps({"chat_template": value.value}),
    }
    tokenizer = Tokenizer.from_files(files, where=str(path))
    assert tokenizer is not None
    try:
        tokenizer.render(HELLO)
    except DFlashError as error:
        raise ConfigError(f"the new chat template does not work: {error}") from None


# Writing.


@contextlib.contextmanager
def _locked(path: Path, *, writes: bool) -> Iterator[None]:
    """Keep other editors away from a file, and check that it may be changed.

    Raises:
      CheckpointError: it is edited by another process, read-only, or in a cache.
    """
    place = Path(os.path.realpath(path))
    if not writes or not place.is_file():  # a pipe would wait for a writer
        yield
        return
    if place.parent.name == BLOBS:
        raise CheckpointError(
            f"{path} lies in a cache ({place.parent}), whose files are named by their contents;"
            " give --output NEW.gguf"
        )
    if not place.stat().st_mode & stat.S_IWUSR or not os.access(place, os.W_OK):
        raise CheckpointError(f"{path} is read-only; make it writable, or give --output NEW.gguf")
    descriptor = os.open(place, os.O_RDONLY)
    try:
        if lock(descriptor) is False:
            raise CheckpointError(f"{path} is being edited by another process; try again")
        yield
    finally:
        os.close(descriptor)


def _planned(shard: Shard) -> list[PlannedBlocks]:
    return [PlannedBlocks(info.name, info.kind, info.shape) for info in shard.header.tensors]


def _patch(shard: Shard, metadata: Mapping[str, Typed]) -> tuple[int, bytes, bytes] | None:
    """Return where the header changes, the new bytes and the old ones; None if it needs a copy."""
    old = shard.header
    listed = _planned(shard)
    new = head_bytes(metadata, listed, old.alignment, old.version)
    tensors = len(new) - (old.stop - old.keys_stop)
    if round_up(len(new), old.alignment) != old.data_start:
        return None
    if new[tensors:] != shard.buffer[old.keys_stop : old.stop]:  # there are gaps between tensors
        return None
    new += b"\0" * (old.data_start - len(new))
    before = shard.buffer[: old.data_start]
    differs = np.frombuffer(new, np.uint8) != np.frombuffer(before, np.uint8)
    places = np.flatnonzero(differs)
    first = int(places[0])
    last = int(places[-1])
    if first // PAGE != last // PAGE:
        return None
    if Path(os.path.realpath(shard.path)).stat().st_nlink > 1:  # the other name may be a backup
        return None
    return first, new[first : last + 1], before[first : last + 1]


def _write_inside(path: Path, start: int, new: bytes, old: bytes) -> None:
    """Write bytes of one page.

    Raises:
      CheckpointError: the file has changed since it was read, or cannot be written.
    """
    place = Path(os.path.realpath(path))
    try:
        with place.open("r+b", buffering=0) as file:
            file.seek(start)
            if file.read(len(old)) != old:
                raise CheckpointError(f"{path} has changed meanwhile; try again")
            file.seek(start)
            file.write(new)
        flush(place)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror})") from error


def _size(shard: Shard, metadata: Mapping[str, Typed]) -> int:
    listed = _planned(shard)
    alignment = shard.header.alignment
    head = len(head_bytes(metadata, listed, alignment))
    return sum(round_up(size, alignment) for size in (head, *(x.nbytes for x in listed)))


def _write_copy(
    shard: Shard,
    metadata: Mapping[str, Typed],
    output: Path,
    overwrite: bool,
    progress: Callable[[str, int], object],
) -> None:
    """Write the file again, which takes the place of `output` when it is complete."""
    place = Path(os.path.realpath(shard.path))
    tensors = GgufFile([shard])
    own = os.path.realpath(output) == str(place)
    needed = _size(shard, metadata)

    def read(planned: PlannedBlocks) -> np.ndarray:
        progress(planned.name, math.prod(planned.shape))
        trim_mapped_memory(tensors)
        return tensors.raw(planned.name)

    with new_path(output, overwrite=overwrite or own, needed=needed) as at:
        with at.open("wb") as file:
            write_gguf(file, metadata, _planned(shard), read, alignment=shard.header.alignment)
        if own:
            shutil.copymode(place, at)
            with contextlib.suppress(OSError):  # another user's file
                os.chown(at, place.stat().st_uid, place.stat().st_gid)


def _listed(before: Mapping[str, Typed], after: Mapping[str, Typed]) -> list[dict[str, str]]:
    """Return the keys that differ, with their values in words."""
    keys = [key for key in {**before, **after} if _bare(before.get(key)) != _bare(after.get(key))]
    return [
        {"key": key, "before": _shown(before.get(key)), "after": _shown(after.get(key))}
        for key in keys
    ]


def _bare(item: Typed | None) -> Any:
    """Return a value that can be compared."""
    if item is None:
        return None
    value = item.value
    if isinstance(value, GgufArray):
        value = value.raw if len(value) > SHOWN else value.tolist()
    return item.kind, type(value), value


def _shown(item: Typed | None) -> str:
    if item is None:
        return "nothing"
    value = item.value
    if isinstance(value, GgufArray):
        value = value.tolist() if len(value) <= SHOWN else f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(value)} long)"
