"""API keys with their owners and limits, as files have them.

A file has a key a line, after a name and before limits, both of which may be left out:

    # comment
    alice: sk-1 rpm=60
    sk-2

Several keys of one name are one owner's: to change a key, add the new one, and remove the old one
once nobody uses it. No key is kept, only its digests. Standard library only.
"""

import dataclasses
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import RequestError

ENVIRONMENT = "DFLASH_API_KEY"
KEY = re.compile(r"[!-~]+")
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
LINE = re.compile(r"(?:(?P<name>[^\s:]+)\s*:\s+)?(?P<key>\S+)(?P<limits>(?:\s+\S+)*)")
COMMENT = re.compile(r"(^|\s)#.*")
LIMIT = re.compile(r"(?P<name>[a-z]+)=(?P<number>[0-9]{1,15})")
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits on the requests of one owner that generate; None for no limit.

    Attributes:
      parallel: requests at a time.
      rpm: requests a minute.
      tpm: tokens of prompts and outputs a minute. They are counted when a request ends: a request
        may exceed the limit, and the next ones wait longer.
    """

    parallel: int | None = None
    rpm: int | None = None
    tpm: int | None = None


LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key that the server accepts.

    Attributes:
      digest: SHA-256 digest of the key.
      label: name of the key in log and metrics: its own name, or its place among all keys.
      owner: owner of the key. All keys of one name have one owner; a key without a name has its
        own.
      cache_salt: separates cached prefixes of this key from those of others, also on disk.
    """

    digest: bytes = dataclasses.field(repr=False)
    label: str
    owner: str = dataclasses.field(repr=False)
    cache_salt: str = dataclasses.field(repr=False)
    limits: KeyLimits = KeyLimits()

    @classmethod
    def of(cls, key: str, name: str = "", limits: KeyLimits = KeyLimits()) -> "ApiKey":
        """Return a key; `unique` labels those without a name."""
        encoded = key.encode()
        digest = hashlib.sha256(encoded).digest()
        return cls(
            digest=digest,
            label=name,
            owner=f"name {name}" if name else f"key {digest.hex()}",
            cache_salt=hashlib.sha256(b"prefixes of the key " + encoded).hexdigest(),
            limits=limits,
        )


# Stands for the key where a server needs none.
ANYONE = ApiKey(digest=b"", label="", owner="", cache_salt="")


def parse_keys(lines: Iterable[str], source: str) -> list[ApiKey]:
    """Return the keys of lines; errors name the line, and never repeat it.

    Raises:
      RequestError: a line is no key that a client can send, or has a wrong name or limit.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        text = COMMENT.sub("", line).strip()
        if not text:
            continue
        where = f"{source}: key {number}"
        match = LINE.fullmatch(text)
        assert match is not None
        if match["name"] is None and ":" in match["key"]:
            raise RequestError(
                f"{where} has a colon, but no name; write NAME: KEY with a space after the colon"
            )
        keys.append(
            new_key(
                match["key"],
                match["name"] or "",
                _limits(match["limits"].split(), where),
                where,
            )
        )
    return keys


def new_key(key: str, name: str, limits: KeyLimits, where: str) -> ApiKey:
    """Return a key whose parts are checked; arguments as for `ApiKey.of`.

    Raises:
      RequestError: the key or its name has other characters than allowed.
    """
    if not KEY.fullmatch(key):
        raise RequestError(
            f"{where} has spaces or other characters that no client can send; expected letters,"
            " digits and punctuation of ASCII"
        )
    if name and not NAME.fullmatch(name):
        raise RequestError(
            f"{where} has a name with other characters than letters and digits of ASCII, '_', '.',"
            " '@' and '-', or more than 64"
        )
    return ApiKey.of(key, name, limits)


def _limits(words: Sequence[str], where: str) -> KeyLimits:
    limits: dict[str, int] = {}
    for word in words:
        match = LIMIT.fullmatch(word)
        if match is None or match["name"] not in LIMITS or int(match["number"]) < 1:
            raise RequestError(
                f"{where} is followed by what is no limit; expected {'=N, '.join(LIMITS)}=N, with"
                " integers of at least 1; no key has spaces"
            )
        limits[match["name"]] = int(match["number"])
    return KeyLimits(**limits)


def unique(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Return the keys without repetitions, all with labels.

    Raises:
      RequestError: one key has two names, or one name different limits.
    """
    by_digest: dict[bytes, ApiKey] = {}
    first_of: dict[str, ApiKey] = {}  # the first key of each owner, which has the limits
    for key in keys:
        same = by_digest.setdefault(key.digest, key)
        if same.owner != key.owner:
            names = " and to ".join(each.label or "nobody by name" for each in (same, key))
            raise RequestError(f"one key belongs to {names}; give each a key of its own")
        first = first_of.setdefault(key.owner, key)
        if key.limits not in (first.limits, KeyLimits()):
            raise RequestError(
                f"the keys of {key.label} have different limits; write them after the first only"
            )
    labelled = []
    for place, key in enumerate(by_digest.values(), 1):
        label = key.label or f"key-{place}"
        limits = first_of[key.owner].limits
        labelled.append(dataclasses.replace(key, label=label, limits=limits))
    return tuple(labelled)


def read_keys(
    file: str | None,
    other_keys: Sequence[ApiKey] = (),
    *,
    environment: Mapping[str, str] = os.environ,
    report: Report,
) -> tuple[ApiKey, ...]:
    """Return the keys of the environment, of a file, and other keys.

    Args:
      report: takes a warning about the file's permissions.

    Raises:
      RequestError: the variable or the file was given but holds no key, or is wrong.
    """
    keys: list[ApiKey] = []
    text = environment.get(ENVIRONMENT)
    if text is not None:
        keys += parse_keys(text.split(","), ENVIRONMENT)
        if not keys:
            raise RequestError(
                f"{ENVIRONMENT} is {text!r}, which holds no key; give one or several separated by"
                " commas, or unset it to serve without a key"
            )
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise RequestError(f"--api-key-file {file} cannot be read: {reason}") from None
        keys_of_file = parse_keys(lines, f"--api-key-file {file}")
        if not keys_of_file:
            raise RequestError(f"--api-key-file {file} holds no key; write one a line")
        warn_of_readers(file, report)
        keys += keys_of_file
    return unique([*keys, *other_keys])


def warn_of_readers(file: str, report: Report) -> None:
    """Warn of a file with keys that other users of the machine may read or change."""
    status = Path(file).stat()
    mode = stat.S_IMODE(status.st_mode)
    if os.name == "posix" and stat.S_ISREG(status.st_mode) and mode & 0o066:
        verb = "change" if mode & 0o022 else "read"
        report(
            f"warning: other users can {verb} the keys in {file},"
            f" whose mode is {mode:04o}; run chmod 600 {file}"
        )


def keys_of(table: Mapping[str, Any], source: str) -> list[ApiKey]:
    """Return the keys of a table: for each name a key, several, or a table with limits.

    Raises:
      RequestError: a value is wrong.
    """
    keys: list[ApiKey] = []
    for name, value in table.items():
        where = f"{source}: the key {name!r}"
        entry = dict(value) if isinstance(value, Mapping) else {"key": value}
        secrets = entry.pop("key", None)
        secrets = [secrets] if isinstance(secrets, str) else secrets
        if not isinstance(secrets, list) or not secrets or not all_texts(secrets):
            raise RequestError(f"{where}: expected key = 'TEXT', or a list of texts")
        for limit, number in entry.items():
            if limit not in LIMITS or type(number) is not int or number < 1:
                raise RequestError(
                    f"{where} has a wrong entry {limit!r}; expected {', '.join(LIMITS)} with"
                    " integers of at least 1"
                )
        limits = KeyLimits(**entry)
        keys += [new_key(key, name, limits, where) for key in secrets]
    return keys


def all_texts(values: Sequence[Any]) -> bool:
    """Return whether all values are texts."""
    return all(isinstance(value, str) for value in values)
