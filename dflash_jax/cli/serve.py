"""`dflash-jax serve`: an OpenAI- and Anthropic-compatible server."""

import argparse
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.errors import RequestError, install_hint
from dflash_jax.plan import FIELDS as PLAN_FIELDS
from dflash_jax.plan import Plan
from dflash_jax.serve_options import FIELDS, PREFIX_CACHE, ServeOptions

log = logging.getLogger("dflash_jax.server")


def add_command(commands: Any) -> None:
    """Add `serve` to the command line."""
    text = "Serve the OpenAI and Anthropic APIs over HTTP."
    command = shared.new_command(commands, "serve", run, text, check=check)
    server = command.add_argument_group("server")
    shared.add_flags(
        server, ServeOptions, FIELDS, [name for name in FIELDS if name not in shared.MODELS]
    )
    shared.add_flags(server, Plan, PLAN_FIELDS, ["prefix_folder", "prefix_disk"])
    shared.model_options(command)
    command.set_defaults(prefix_cache=PREFIX_CACHE, report_drafts=None)


def check(options: argparse.Namespace) -> None:
    """Check the options before JAX is imported or a model is opened, and put them together."""
    from dflash_jax.server.configuration import normalized

    _survive_hangups()
    given: dict[str, Any] = {name: getattr(options, name) for name in (*FIELDS, "report_drafts")}
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    options.serve = normalized(ServeOptions(plan=shared.chosen_plan(options), **given))
    if options.ray is not None:
        from dflash_jax import ray

        ray.check_installed()


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax serve` until a signal arrives."""
    try:
        import asyncio

        from dflash_jax.server.access_log import log_to_stderr
        from dflash_jax.server.keys import ENVIRONMENT
        from dflash_jax.server.run import RunningServer, serve
    except ImportError as error:
        raise RequestError(
            f"serving needs more packages ({error}); {install_hint('serve')}"
        ) from error
    from dflash_jax.graph.build import BackgroundCompiler
    from dflash_jax.server.configuration import configuration

    given: ServeOptions = options.serve
    log_to_stderr(quiet=given.quiet, form=given.log_format)
    engines, config = configuration(given, _launcher(given), report=log.warning)
    if given.host not in ("127.0.0.1", "::1", "localhost") and not config.api_keys:
        log.warning("open to the network without a key; set %s", ENVIRONMENT)
    if "*" in given.cors_origin and not config.api_keys:
        log.warning("open to any web page without a key; set %s", ENVIRONMENT)

    def started(running: RunningServer) -> None:
        print(f"listening on {running.url}", flush=True)

    compiler = BackgroundCompiler()
    asyncio.run(serve(engines, config, started=started, compiler=compiler))
    if compiler.compiling:
        _leave()
    return 0


def _survive_hangups() -> None:
    """Let SIGHUP do nothing until the server handles it, by reading its keys again.

    A service manager may send it at any time. Child processes get the default again.
    """
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and threading.current_thread() is threading.main_thread():
        signal.signal(hangup, lambda number, frame: None)


def _launcher(options: ServeOptions) -> Any:
    """Return what starts workers on a cluster; None to start them here."""
    if options.ray is None:
        return None
    from dflash_jax import ray

    return functools.partial(ray.host_launcher, options.ray, options.hosts)


def _leave() -> None:
    """End the process at once: Python would wait for a compilation, which cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)
