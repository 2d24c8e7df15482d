"""Starts the server: sockets, engine threads, signals and graceful shutdown."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from dflash_jax.engine.engine import Engine
from dflash_jax.graph.background import BackgroundCompiler
from dflash_jax.server import log_rate, open_connections
from dflash_jax.server.app import Server
from dflash_jax.server.engine_thread import EngineThread
from dflash_jax.server.errors import shutting_down
from dflash_jax.server.http_connection import Connection
from dflash_jax.server.listening import bind
from dflash_jax.server.served_models import ServedModel, ServerConfig

log = logging.getLogger("dflash_jax.server")

HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows
GRACE_S = 5  # seconds in which requests end after they were told to


class _DrainingServer(uvicorn.Server):
    """Drains on the first signal, then ends normally.

    It listens while requests are running, so that new ones can read that it drains. A second signal
    ends running requests with an error, and a third one the server at once.
    """

    def __init__(self, config: uvicorn.Config, routes: Server, drain: float):
        super().__init__(config)
        self._connections = open_connections.BoundedConnections(open_connections.most_connections())
        vars(self)["server_state"] = self._connections  # uvicorn passes it to connections
        self._routes = routes
        self._drain = drain
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with a longer queue of connections than are accepted at once."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(open_connections.QUEUED)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests; refuse new ones, and those whose body has not come."""
        loop = asyncio.get_running_loop()
        last = loop.time() + self._drain + GRACE_S
        end = loop.call_later(self._drain, self._connections.evict_unread)
        self._refuse_unfinished()
        while self._routes.busy and not self.force_exit and loop.time() < last:
            await asyncio.sleep(0.02)
        self._refuse_unfinished()
        await super().shutdown(sockets)
        end.cancel()

    def _refuse_unfinished(self) -> None:
        for connection in list(self._connections.receiving):
            connection.refuse(shutting_down())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = self._signal_handlers()
        before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                if handler is not None:
                    signal.signal(number, handler)

    def _signal_handlers(self) -> dict[int, Callable[[], object]]:
        """Return what signals do: SIGHUP, where there is one, has the keys read again."""
        handlers: dict[int, Callable[[], object]] = {
            number: functools.partial(self.handle_exit, number, None)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        if HANGUP is not None:
            handlers[HANGUP] = self._routes.reload_keys
        return handlers

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._signals += 1
        self._routes.drain(self._drain if self._signals == 1 else 0)
        self.should_exit = True
        self.force_exit = self._signals > 2


@dataclasses.dataclass(frozen=True)
class RunningServer:
    """A server that is listening.

    Attributes:
      port: the port of its API.
    """

    url: str
    port: int
    server: Server
    _stop: Callable[[], object]

    def stop(self) -> None:
        """Shut down as on SIGTERM; callable from any thread, also after the server ended."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._stop()


async def serve(
    engines: Mapping[str, Callable[[], Engine]],
    listening: ServerConfig,
    *,
    started: Callable[[RunningServer], None] | None = None,
    ready: Callable[[], None] | None = None,
    compiler: BackgroundCompiler | None = None,
) -> None:
    """Serve until a signal arrives.

    Args:
      engines: for each model name, a function that loads the engine; called in a thread.
      started: called once the server is listening.
      ready: called once all models are ready for the first time.
      compiler: compiles the programs of all models; stopped at the end.

    Raises:
      RequestError: the address cannot be bound.
      DFlashError: a model could not be loaded.
    """
    log_rate.limit_logs()
    asyncio.get_running_loop().set_exception_handler(log_rate.report_loop_error)
    sockets = bind(listening.host, listening.port)  # first, since loading takes long
    bound = [listening.host]
    for each in sockets:
        address, *_ = each.getsockname()
        bound.append(address)
    metrics_port = None
    if listening.metrics_port is not None:
        metrics_sockets = bind(listening.host, listening.metrics_port)
        _, metrics_port, *_ = metrics_sockets[0].getsockname()
        sockets += metrics_sockets
        log.info("metrics are on %s", f"{url_of(listening.host, metrics_port)}/metrics")
    server = new_server(engines, listening, bound, compiler or BackgroundCompiler(), metrics_port)
    threads = [model.engine_thread for model in server.models]
    config = uvicorn.Config(
        server.app,
        host=listening.host,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=64 * 1024,
        loop="asyncio",
        lifespan="off",
        backlog=open_connections.ACCEPTED_AT_ONCE,
        timeout_keep_alive=75,  # longer than clients reuse idle connections
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(listening.drain) + GRACE_S,
    )
    runner = _DrainingServer(config, server, listening.drain)
    watch = asyncio.ensure_future(_watch(runner, threads))
    announce = asyncio.ensure_future(_announce(runner, server, started, ready))
    try:
        await runner.serve(sockets)
    finally:
        for task in (watch, announce):
            task.cancel()
        await asyncio.gather(*(thread.stop() for thread in threads))
    for thread in threads:
        if thread.error is not None:
            raise thread.error


def new_server(
    engines: Mapping[str, Callable[[], Engine]],
    config: ServerConfig,
    bound: Sequence[str],
    compiler: BackgroundCompiler,
    metrics_port: int | None = None,
) -> Server:
    """Return a server whose threads load their engines; called in a running event loop.

    Args:
      engines, compiler: as for `serve`.
      bound, metrics_port: as for `Server`.
    """
    threads = {
        name: EngineThread(make, name=name, warm=config.warm, compiler=compiler)
        for name, make in engines.items()
    }
    models = [ServedModel(name, thread, config) for name, thread in threads.items()]
    return Server(models, config, bound, metrics_port)


async def _watch(runner: uvicorn.Server, threads: Sequence[EngineThread]) -> None:
    """End the server when a model cannot be loaded, or its engine has failed."""
    ends = [asyncio.ensure_future(thread.ended.wait()) for thread in threads]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        runner.should_exit = True
    finally:
        for task in ends:
            task.cancel()


async def _announce(
    runner: _DrainingServer,
    server: Server,
    started: Callable[[RunningServer], None] | None,
    ready: Callable[[], None] | None,
) -> None:
    while not runner.started:
        await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    _, port, *_ = runner.servers[0].sockets[0].getsockname()
    url = url_of(runner.config.host, port)
    log.info("listening on %s", url)
    if started:
        terminate = functools.partial(runner.handle_exit, signal.SIGTERM, None)
        stop = functools.partial(loop.call_soon_threadsafe, terminate)
        started(RunningServer(url, port, server, stop))
    await asyncio.gather(*(model.engine_thread.ready.wait() for model in server.models))
    if ready:
        ready()
    log.info("ready: %s serves %s", url, ", ".join(model.name for model in server.models))


def url_of(host: str, port: int) -> str:
    """Return the URL of a host and port; IPv6 addresses are put in brackets."""
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
