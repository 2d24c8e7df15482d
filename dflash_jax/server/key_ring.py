"""The API keys that a running server accepts, and what their owners have used of their limits."""

import hashlib
import math
import time
from collections.abc import Sequence

from dflash_jax.server.keys import ApiKey, KeyLimits
from dflash_jax.server.protocol import Problem

MINUTE = 60.0  # seconds


class Allowance:
    """A number of units a minute. The units of a whole minute may be used at once."""

    def __init__(self, per_minute: int):
        self.per_minute = per_minute
        self._left = float(per_minute)  # units that could be used at `_refilled`
        self._refilled = time.monotonic()

    def wait_s(self, least: float) -> float:
        """Return the seconds until this many units are left."""
        now = time.monotonic()
        left = self._left + (now - self._refilled) * self.per_minute / MINUTE
        self._left = min(left, float(self.per_minute))
        self._refilled = now
        return max(least - self._left, 0.0) * MINUTE / self.per_minute

    def take(self, units: int) -> None:
        """Use units, also more than are left."""
        self._left -= units


class KeyUsage:
    """What the requests of one owner use at the moment.

    Attributes:
      running: number of requests that generate.
    """

    def __init__(self, limits: KeyLimits):
        self.limits = limits
        self.running = 0
        self._requests = Allowance(limits.rpm) if limits.rpm else None
        self._tokens = Allowance(limits.tpm) if limits.tpm else None

    def begin(self, label: str) -> None:
        """Count a request that begins.

        Raises:
          Problem: 429, a limit is reached.
        """
        limits = self.limits
        if limits.parallel and self.running >= limits.parallel:
            raise _refusal(label, f"{limits.parallel} requests at a time", 1.0)
        if self._tokens:
            wait = self._tokens.wait_s(1.0)
            if wait > 0:
                raise _refusal(label, f"{limits.tpm} tokens a minute", wait)
        if self._requests:
            wait = self._requests.wait_s(1.0)
            if wait > 0:
                raise _refusal(label, f"{limits.rpm} requests a minute", wait)
            self._requests.take(1)
        self.running += 1

    def end(self, tokens: int) -> None:
        """Count the end of a request, and its tokens."""
        self.running -= 1
        if self._tokens:
            self._tokens.take(tokens)


def _refusal(label: str, limit: str, wait: float) -> Problem:
    seconds = max(math.ceil(wait), 1)
    return Problem(
        f"the key {label!r} is limited to {limit}; try again in about {seconds} s",
        status=429,
        code="rate_limit_exceeded",
        retry_s=seconds,
    )


class KeyRing:
    """The keys that a server accepts now. For the event loop only."""

    def __init__(self, keys: Sequence[ApiKey] = ()):
        self._keys: dict[bytes, ApiKey] = {}
        self._usage: dict[str, KeyUsage] = {}
        self.replace(keys)

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys)

    @property
    def owners(self) -> list[str]:
        """The owners of the keys, each once."""
        return list(dict.fromkeys(key.owner for key in self._keys.values()))

    @property
    def labels(self) -> list[str]:
        """The names of the keys in the log, each once."""
        return list(dict.fromkeys(key.label for key in self._keys.values()))

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from now on; usage stays counted for owners whose limits stay."""
        limits = {key.owner: key.limits for key in keys}
        self._usage = {
            owner: usage
            for owner, usage in self._usage.items()
            if limits.get(owner) == usage.limits
        }
        self._keys = {key.digest: key for key in keys}

    def find(self, presented_key: str) -> ApiKey | None:
        """Return the key that a client presents, or None if there is no such key.

        It is looked up by its digest, so that the time that this takes tells nothing about it.
        """
        return self._keys.get(hashlib.sha256(presented_key.encode()).digest())

    def begin(self, key: ApiKey) -> KeyUsage:
        """Count a request that generates; `KeyUsage.end` has to follow.

        Raises:
          Problem: 429, a limit is reached.
        """
        if key.owner not in self._usage:
            self._usage[key.owner] = KeyUsage(key.limits)
        usage = self._usage[key.owner]
        usage.begin(key.label)
        return usage
