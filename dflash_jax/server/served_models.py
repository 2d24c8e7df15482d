"""Served models (pairs of target and drafter) by name, and the configuration of their server."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.engine_thread import EngineThread, Warm
from dflash_jax.server.errors import not_ready
from dflash_jax.server.keys import ApiKey
from dflash_jax.server.protocol import Problem
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tool_parsers import Syntax, syntax_of

STALLED_S = 120.0  # seconds after which a step fails health checks; steps take less than a second
ANY = "any"
LONGEST_NAME = 512  # characters; responses repeat the name in every chunk
NO_NAME = (None, "", ANY, "dummy")  # Hugging Face's client sends "dummy" for none


def answer_name(name: str, asked: str | None) -> str:
    """Return a model's name in a response: the name in the request, if it named a model."""
    if asked is None or asked in NO_NAME:
        return name
    return asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(ServeOptions):
    """Options of a server, with the keys and rules that they name.

    Attributes:
      api_keys: accepted keys; if empty, no key is needed.
      read_keys: reads the keys again; None where they stay as they are.
      keepalive: seconds without output after which a stream gets a comment.
      plain_recovery: rules for requests without tools.
      tool_recovery: rules for requests with tools.
    """

    # Without a command, programs compile once they are needed.
    warm: Warm = "none"
    api_keys: tuple[ApiKey, ...] = ()
    read_keys: Callable[[], tuple[ApiKey, ...]] | None = None
    keepalive: float = 15.0
    plain_recovery: Recovery = OFF
    tool_recovery: Recovery = OFF


@dataclasses.dataclass
class ServedModel:
    """A pair of target and drafter, served under a name.

    Attributes:
      created: Unix time.
      last_used_ms: Unix time in milliseconds of the last finished request; 0 if there is none.
      tool_turns: output ids of past turns with tool calls.
    """

    name: str
    engine_thread: EngineThread
    defaults: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    last_used_ms: int = 0
    tool_turns: ToolTurnCache = dataclasses.field(default_factory=ToolTurnCache)

    @property
    def engine(self) -> Engine:
        """Return the engine.

        Raises:
          Problem: 503 until the engine is ready, 500 after it failed.
        """
        if self.engine_thread.error is not None:
            raise Problem(
                f"the engine stopped: {self.engine_thread.error}", status=500, code="engine_failed"
            )
        engine = self.engine_thread.engine
        if engine is None:
            raise not_ready(None, self.engine_thread.first)
        if not self.engine_thread.ready.is_set():
            raise not_ready(engine.core.runner.compiled, self.engine_thread.first)
        return engine

    def check_turns(self) -> None:
        """Check that the engine still makes turns, once it was ready.

        Raises:
          Problem: 503, its current turn takes longer than `STALLED_S`.
        """
        seconds = self.engine_thread.turn_s if self.engine_thread.ready.is_set() else 0.0
        if seconds > STALLED_S:
            raise Problem(
                f"{self.name}: a step of the engine has taken {seconds:.0f} s so far, and requests"
                f" wait; expected at most {STALLED_S:g} s: restart the server",
                status=503,
                code="engine_stalled",
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a hash of weights, configurations and the plan fields that affect numerics."""
        engine = self.engine
        plan = engine.plan
        numerics = (plan.dtype, plan.block, plan.chunk, plan.exact)
        described = (engine.graph.config, engine.graph.drafter_config, numerics)
        digest = hashlib.sha256(repr(described).encode())
        digest.update(engine.core.runner.executor.digest)
        return f"fp_{digest.hexdigest()[:12]}"

    @functools.cached_property
    def syntax(self) -> Syntax | None:
        """Return the model's syntax of tool calls and reasoning, or None if it is unknown."""
        tokenizer = (self.engine_thread.engine or self.engine).tokenizer
        return syntax_of(tokenizer.teaches if tokenizer else None)


class ServedModels:
    """All served models.

    Args:
      aliases: further names, each with the name of its model.
      any_name: names of no model mean the most recently used one.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        aliases: Iterable[tuple[str, str]] = (),
        *,
        any_name: bool = False,
    ):
        self._models = list(models)
        self._aliases = dict(aliases)
        self._any_name = any_name

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __getitem__(self, at: int) -> ServedModel:
        return self._models[at]

    @property
    def names(self) -> list[str]:
        """Return the names of all models, and their aliases."""
        return [*(model.name for model in self), *self._aliases]

    def named(self, name: str | None) -> ServedModel:
        """Return the model of this name or alias; for a name in NO_NAME, the last used one.

        Raises:
          Problem: 404, there is no such model.
        """
        by_name = {model.name: model for model in self}
        asked = name or ""
        for known in (asked, self._aliases.get(asked)):
            if known in by_name:
                return by_name[known]
        takes_any = self._any_name and len(asked) <= LONGEST_NAME
        if name in NO_NAME or takes_any:
            return max(self, key=lambda model: model.last_used_ms)
        raise Problem(
            f"there is no model {asked[:LONGEST_NAME]!r}; loaded are"
            f" {', '.join(self.names)}, and {ANY!r} takes the last used; `dflash-jax serve`"
            " gives a model further names by --alias NAME=MODEL, and takes every name with"
            " --serve-any-name",
            status=404,
            param="model",
            code="model_not_found",
        )
