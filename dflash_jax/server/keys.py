"""API keys, their owners and what these may use, as files have them.

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
    """What the requests of one owner that generate may use; None for no limit.

    Attributes:
      parallel: requests at a time.
      rpm: requests a minute.
      tpm: tokens of prompts and outputs a minute. They are counted when a request ends, so that
        one may go beyond it, and the next ones wait longer.
    """

    parallel: int | None = None
    rpm: int | None = None
    tpm: int | None = None


LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key that the server accepts.

    Attributes:
      digest: of the key.
      label: what the log and metrics call it: its name, or its place among all keys.
      owner: whose it is; all keys of one name have one, and without a name a key has its own.
      cache_salt: separates its prefixes from those of others, also on disk and later.
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


ANYONE = ApiKey(digest=b"", label="", owner="", cache_salt="")  # of a server without keys


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
    given: dict[str, int] = {}
    for word in words:
        match = LIMIT.fullmatch(word)
        if match is None or match["name"] not in LIMITS or int(match["number"]) < 1:
            raise RequestError(
                f"{where} is followed by what is no limit; expected {'=N, '.join(LIMITS)}=N, with"
                " integers of at least 1; no key has spaces"
            )
        given[match["name"]] = int(match["number"])
    return KeyLimits(**given)


def unique(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Return the keys without repetitions, all with labels.

    Raises:
      RequestError: one key has two names, or one name different limits.
    """
    found: dict[bytes, ApiKey] = {}
    owners: dict[str, ApiKey] = {}
    for key in keys:
        known = found.setdefault(key.digest, key)
        if known.owner != key.owner:
            names = " and to ".join(x.label or "nobody by name" for x in (known, key))
            raise RequestError(f"one key belongs to {names}; give each a key of its own")
        other = owners.setdefault(key.owner, key)
        if key.limits not in (other.limits, KeyLimits()):
            raise RequestError(
                f"the keys of {key.label} have different limits; write them after the first only"
            )
    return tuple(
        dataclasses.replace(key, label=key.label or f"key-{place}", limits=owners[key.owner].limits)
        for place, key in enumerate(found.values(), 1)
    )


def read_keys(
    file: str | None,
    more: Sequence[ApiKey] = (),
    *,
    environment: Mapping[str, str] = os.environ,
    report: Report,
) -> tuple[ApiKey, ...]:
    """Return the keys of the environment, of a file, and further ones.

    Args:
      report: takes a warning about the file's permissions.

    Raises:
      RequestError: the variable or the file was given but holds no key, or is wrong.
    """
    keys: list[ApiKey] = []
    if (text := environment.get(ENVIRONMENT)) is not None:
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
        named = parse_keys(lines, f"--api-key-file {file}")
        if not named:
            raise RequestError(f"--api-key-file {file} holds no key; write one a line")
        warn_of_readers(file, report)
        keys += named
    return unique([*keys, *more])


def warn_of_readers(file: str, report: Report) -> None:
    """Warn of a file with keys that other users of the machine may read or change."""
    status = Path(file).stat()
    others = stat.S_IMODE(status.st_mode) & 0o066
    if os.name == "posix" and stat.S_ISREG(status.st_mode) and others:
        report(
            f"warning: other users can {'change' if others & 0o022 else 'read'} the keys in {file},"
            f" whose mode is {stat.S_IMODE(status.st_mode):04o}; run chmod 600 {file}"
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
