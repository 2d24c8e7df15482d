"""A real server on a loopback port, over a random tiny engine with the shipped tokenizer."""

import asyncio
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.graph import Graph
from dflash_jax.loading import locate
from dflash_jax.networks import build_graph
from dflash_jax.server.access_log import LOGGERS
from dflash_jax.server.keys import ApiKey, parse_keys, unique
from dflash_jax.server.run import RunningServer, ServerConfig, serve
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target
from dflash_jax.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing them takes seconds
    import anthropic
    import openai

ROWS, CONTEXT, QUEUE, MAX_BODY = 3, 512, 24, 2**20
SIZES = {"rows": ROWS, "max_length": CONTEXT, "chunk": 64, "block": 4, "queue": QUEUE}
PLAN = Plan(**SIZES, prefix_cache=2**20, report_drafts=True)


@dataclasses.dataclass
class LiveServer:
    """A server in a thread, and clients for it."""

    running: RunningServer
    thread: threading.Thread
    announced: threading.Event  # once it was ready

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def engine(self) -> Engine:
        return self.running.server.models[0].engine

    @functools.cached_property
    def openai(self) -> "openai.OpenAI":
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    @functools.cached_property
    def anthropic(self) -> "anthropic.Anthropic":
        import anthropic

        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    def is_idle(self, seconds: float = 20.0) -> bool:
        """Wait for all requests to finish; return whether they did within `seconds`."""
        thread = self.running.server.models[0].engine_thread
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not thread.active and not self.engine.core.active and not self.engine.core.queued:
                return True
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        self.running.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


def run_server(
    make: Callable[[], Engine],
    listening: ServerConfig,
    *,
    others: dict[str, Callable] | None = None,
    ready: bool = True,
) -> LiveServer:
    """Start a server in a thread, and wait until it is ready; with `others`, until it listens."""
    found: list[RunningServer] = []
    listens = threading.Event()

    def started(running: RunningServer) -> None:
        found.append(running)
        listens.set()

    announced = threading.Event()
    engines = {"tiny": make} | (others or {})
    main = serve(engines, listening, started=started, ready=announced.set)
    thread = threading.Thread(target=asyncio.run, args=(main,), daemon=True)
    thread.start()
    assert listens.wait(30)
    live = LiveServer(found[0], thread, announced)
    while ready and not others and httpx.get(live.url + "/ready").status_code == 503:
        time.sleep(0.01)
    return live


def api_keys(*lines: str) -> tuple[ApiKey, ...]:
    """The keys of a file's lines."""
    return unique(parse_keys(lines, "the test"))


def twin(engine: Engine, **changes: Any) -> Engine:
    """Return another engine with the same weights and compiled programs, and a changed plan."""
    plan = dataclasses.replace(engine.plan, **changes)
    made = Engine(Graph(engine.graph.pair, plan), engine.params, tokenizer=engine.tokenizer)
    made.core.runner.compiled.executables = engine.core.runner.executables
    return made


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Restores the loggers that `log_to_stderr` sets up."""
    named = [logging.getLogger(name) for name in (*LOGGERS, "dflash_jax.server.requests")]
    before = [(logger, [*logger.handlers], logger.level, logger.propagate) for logger in named]
    yield
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of the shipped target."""
    found = Tokenizer.from_directory(locate("tiny", "target"))
    assert found is not None
    return found


@pytest.fixture(scope="session")
def random_tiny() -> Engine:
    """A warm engine with random weights, three rows, and the shipped tokenizer."""
    target = tiny_target(num_layers=1, vocab_size=2048, eos_token_ids=(2040,))
    one = {"num_layers": 1, "windows": (None,), "causal": (False,)}  # few layers compile fast
    drafter = tiny_drafter(target, target_layer_ids=(0,), **one)
    mute = random_engine(target, drafter, PLAN)
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    engine = Engine(build_graph(target, drafter, mute.plan), mute.params, tokenizer=tokenizer)
    engine.warm_up("greedy", "sampled")
    return engine


@pytest.fixture(scope="session")
def live(random_tiny: Engine) -> Iterator[LiveServer]:
    running = run_server(
        lambda: random_tiny, ServerConfig(port=0, drain=5, max_body=MAX_BODY, keepalive=0.05)
    )
    yield running
    running.openai.close()
    running.anthropic.close()
    running.stop()
