"""`dflash-jax serve`: an OpenAI- and Anthropic-compatible server."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from typing import Any

from dflash_jax.cli import options as shared
from dflash_jax.config import DrafterConfig, TargetConfig, wrong_role
from dflash_jax.errors import PlanError, RequestError, install_hint
from dflash_jax.plan import Plan
from dflash_jax.serve_options import PREFIX_CACHE, ServeOptions, config_options
from dflash_jax.utils.sources import DRAFTER_NAMES, find_local

log = logging.getLogger("dflash_jax.server")


def add_command(commands: Any) -> None:
    """Add `serve` to the command line."""
    text = "Serve the OpenAI and Anthropic APIs over HTTP."
    command: Any = shared.new_command(commands, "serve", run, text, check=check)
    server = command.add_argument_group("server")
    others = (*shared.MODELS, *shared.PLAN_FLAGS)
    shared.add_flags(server, ServeOptions, [x for x in ServeOptions.fields() if x not in others])
    shared.add_flags(server, Plan, ["prefix_folder", "prefix_disk"])
    shared.model_options(command)
    server.add_argument(
        "--check",
        dest="only_check",
        action="store_true",
        help="check options, configuration, keys and models as a start does, and end",
    )
    command.set_defaults(prefix_cache=PREFIX_CACHE, report_drafts=None)
    command.defaults_by_file["--config"] = _config_defaults


def _config_defaults(path: str) -> dict[str, Any]:
    """Return the options that a configuration file sets, as flags would.

    Raises:
      RequestError, PlanError: the file cannot be read, or something in it is wrong.
    """
    names = config_options(path)
    options = ServeOptions.of({"config": path})
    defaults: dict[str, Any] = {}
    for name in names:
        own = name in ServeOptions.fields()
        value = getattr(options if own else options.plan, name)
        if name == "devices":
            defaults |= zip(("target_device", "drafter_device"), value, strict=True)
        else:  # flags add to lists
            defaults[name] = list(value) if own and isinstance(value, tuple) else value
    return defaults


def check(options: argparse.Namespace) -> None:
    """Check the options before JAX is imported or a model is opened, and put them together."""
    from dflash_jax.server.configuration import normalized, to_stderr
    from dflash_jax.server.listening import bind

    _survive_hangups()
    values: dict[str, Any] = {name: getattr(options, name) for name in ServeOptions.fields()}
    wanted = ServeOptions(plan=shared.chosen_plan(options), **values)
    warned = to_stderr if options.only_check else (lambda message: None)
    options.serve = normalized(wanted, warned)
    _check_models(options.serve)
    if options.ray is not None:
        from dflash_jax import ray

        ray.check_installed()
    if not options.only_check:
        ports = [wanted.port, wanted.metrics_port]
        if wanted.host_index:  # a host that follows listens at neither
            ports = []
        for port in ports:  # and again once models are open
            if port is None:
                continue
            for socket in bind(wanted.host, port):
                socket.close()
    else:
        options.uses_jax = False
        options.run = _say_checked


def _check_models(options: ServeOptions) -> None:
    """Check the headers of models on this machine against the plan; those of the hub come later."""
    from dflash_jax.converters.models import open_model

    length = options.plan.max_length
    pairs = [(options.target, options.drafter), *options.models.values()]
    for target, drafter in pairs:
        if path := find_local(target, "target"):
            config = open_model(path).config
            if not isinstance(config, TargetConfig):
                raise wrong_role(path, "target")
            if length > config.max_length:
                raise PlanError(
                    f"max_length is {length}, but {target} was made for {config.max_length}"
                    f" positions; ask for at most {config.max_length}"
                )
        path = None if drafter in DRAFTER_NAMES else find_local(drafter, "drafter")
        if path and not isinstance(open_model(path).config, DrafterConfig):
            raise wrong_role(path, "drafter")


def _say_checked(options: argparse.Namespace) -> int:
    """Print what would be served."""
    from dflash_jax.server.configuration import accepted_keys

    served: ServeOptions = options.serve
    labels = dict.fromkeys(key.label for key in accepted_keys(served, lambda message: None))
    print(f"{served.config or 'the options'}: good")
    print(f"address  {served.host}, port {served.port}")
    print(f"models   {', '.join([served.first_name, *served.models])}")
    if served.aliases:
        print(f"aliases  {', '.join(f'{name} of {model}' for name, model in served.aliases)}")
    print(f"keys     {', '.join(labels) or 'none'}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax serve` until a signal arrives."""
    try:
        from dflash_jax.server.access_log import log_to_stderr
        from dflash_jax.server.run import serve  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"serving needs more packages ({error}); {install_hint('serve')}"
        ) from error
    served: ServeOptions = options.serve
    log_to_stderr(quiet=served.quiet, form=served.log_format)
    if served.hosts == 1:
        return _serve(served)
    if served.ray is not None:
        from dflash_jax import ray

        ray.serve_one_model(served, _say_listening)
        return 0
    from dflash_jax.server import serving_hosts

    serving_hosts.run(served, lambda: _serve(served))


def _serve(served: ServeOptions) -> int:
    """Answer HTTP until a signal arrives."""
    import asyncio

    from dflash_jax.graph.background import BackgroundCompiler
    from dflash_jax.server.configuration import configuration
    from dflash_jax.server.keys import ENVIRONMENT
    from dflash_jax.server.run import RunningServer, serve
    from dflash_jax.utils.allocator import freeze_objects

    engines, config = configuration(served, report=log.warning)
    if served.host not in ("127.0.0.1", "::1", "localhost") and not config.api_keys:
        log.warning("open to the network without a key; set %s", ENVIRONMENT)
    if "*" in served.cors_origin and not config.api_keys:
        log.warning("open to any web page without a key; set %s", ENVIRONMENT)

    def started(running: RunningServer) -> None:
        _say_listening(running.url)

    compiler = BackgroundCompiler()
    serving = serve(engines, config, started=started, ready=freeze_objects, compiler=compiler)
    asyncio.run(serving)
    if compiler.compiling and served.hosts == 1:  # several hosts leave together
        _leave()
    return 0


def _say_listening(url: str) -> None:
    print(f"listening on {url}", flush=True)


def _survive_hangups() -> None:
    """Let SIGHUP do nothing until the server handles it, by reading its keys again.

    A service manager may send it at any time. Child processes get the default again.
    """
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and threading.current_thread() is threading.main_thread():
        signal.signal(hangup, lambda number, frame: None)


def _leave() -> None:
    """End the process at once: Python would wait for a compilation, which cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)
