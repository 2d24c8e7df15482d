"""`dflash-jax serve`: an OpenAI- and Anthropic-compatible server."""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_jax.cli.hosts import add_host_options, check_hosts, open_hosted
from dflash_jax.cli.options import (
    add_plan_options,
    check_values,
    conversation_plan,
    model_options,
    new_command,
    open_pair,
    use_compilation_cache,
)
from dflash_jax.errors import RequestError, install_hint

KEYS = "DFLASH_API_KEY"
PREFIX_CACHE = 2**28  # bytes; every turn of a conversation extends the last


def add_command(commands: Any) -> None:
    """Add `serve` to the command line."""
    text = "Serve the OpenAI and Anthropic APIs over HTTP."
    command = new_command(commands, "serve", run, text, check=check)
    server = command.add_argument_group("server")
    _listening_options(server)
    add_host_options(server)
    _request_options(server)
    _compilation_and_cache_options(server)
    model_options(command)
    command.set_defaults(prefix_cache=PREFIX_CACHE, report_drafts=None)


def _listening_options(server: Any) -> None:
    """Add options for addresses, models and limits."""
    server.add_argument(
        "--host", default="127.0.0.1", help="default: 127.0.0.1; 0.0.0.0 listens on every interface"
    )
    server.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    server.add_argument("--name", help="the first model's name; its target's by default")
    server.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=TARGET[,DRAFTER]",
        help="another pair to serve; requests choose models by name (repeatable)",
    )
    server.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="another name for a served model, such as claude-sonnet=tiny (repeatable)",
    )
    server.add_argument(
        "--serve-any-name",
        action="store_true",
        help="answer requests for models of any other name, too; responses repeat that name",
    )
    server.add_argument(
        "--queue", type=int, default=64, help="most outputs that wait or run (default 64)"
    )
    server.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds per request (default 600; 0: no limit)",
    )
    server.add_argument(
        "--drain",
        type=float,
        default=30.0,
        help="seconds for running requests after SIGTERM or SIGHUP (default 30)",
    )
    server.add_argument(
        "--max-body",
        type=int,
        metavar="BYTES",
        help="limit of request bodies (default: 64 bytes per token of the longest context, at least"
        " 4 and at most 32 MiB)",
    )


def _request_options(server: Any) -> None:
    """Add options for request defaults, access and logging."""
    server.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        help="of requests without max_tokens (0: all that fits; 16 for completions)",
    )
    server.add_argument(
        "--temperature", type=float, default=0.0, help="of requests without temperature (0: greedy)"
    )
    server.add_argument(
        "--recovery",
        choices=("off", "tools", "all"),
        help="requests that use dj.Recovery() unless they set recovery themselves: by default those"
        " with tools; all, with the rules of DFLASH_MIN_TOKENS, DFLASH_STALL_TOOL_PREFIX and"
        " DFLASH_DEGENERATE_RUN_TOKENS, if one of these variables is set",
    )
    server.add_argument(
        "--api-key-file",
        type=Path,
        help=f"file with one API key per line; or set {KEYS} to keys separated by commas",
    )
    server.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional name to accept in Host headers (repeatable). Loopback names and --host are"
        " always accepted; *.NAME accepts all subdomains, and * every name, which is the default"
        " with an API key",
    )
    server.add_argument(
        "--cors-origin",
        "--cors",
        dest="cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may use the server, * for any (repeatable)",
    )
    server.add_argument("--metrics", action="store_true", help="add statistics to every response")
    server.add_argument("--no-ui", action="store_true", help="serve no web page at /")
    server.add_argument("--quiet", action="store_true", help="no log line per request")


def _compilation_and_cache_options(server: Any) -> None:
    """Add options for the compilation of programs and grammars, and for the prefix cache."""
    server.add_argument(
        "--warm",
        choices=("none", "common", "all"),
        default="common",
        help="programs to compile before /ready: none compiles greedy ones, common (default) also"
        " sampled ones, and those for recovery, structured output, penalties and log probabilities"
        " in the background afterwards; all compiles all of them",
    )
    server.add_argument(
        "--compile-wait",
        type=float,
        default=50.0,
        metavar="SECONDS",
        help="how long a request waits for programs to be compiled before it gets a 503 with"
        " Retry-After (default 50); streams get comments instead",
    )
    server.add_argument(
        "--grammar-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long a JSON schema or grammar of a request may take to compile (default 30)"
        " before it gets a 400; other requests are not delayed",
    )
    add_plan_options(server, ["prefix_folder", "prefix_disk"])


def check(options: argparse.Namespace) -> None:
    """Check the options before JAX is imported or a model is opened.

    Raises:
      RequestError: a value is wrong.
    """
    check_values(options)
    check_hosts(options)
    if options.queue < 1 or not 0 <= options.port < 2**16:
        raise RequestError("--queue has to be at least 1 and --port from 0 to 65535")
    if options.max_tokens < 0 or not options.temperature >= 0:
        raise RequestError("--max-tokens and --temperature have to be at least 0")
    for name in ("drain", "compile_wait"):
        if not 0 <= (seconds := getattr(options, name)) < math.inf:
            flag = name.replace("_", "-")
            raise RequestError(f"--{flag} is {seconds}; expected seconds, 0 or more")
    if options.max_body is not None and options.max_body < 1:
        raise RequestError(f"--max-body is {options.max_body}; expected bytes, 1 or more")
    if not 0 < options.grammar_timeout < math.inf:
        raise RequestError(
            f"--grammar-timeout is {options.grammar_timeout}; expected seconds, more than 0"
        )

    _aliases(options)

    from dflash_jax.server import access

    options.allowed_host = [access.allowed_host(text) for text in options.allowed_host]
    options.cors = [access.cors_origin(text) for text in options.cors]


def run(options: argparse.Namespace) -> int:
    """Run `dflash-jax serve` until a signal arrives.

    Raises:
      RequestError: the extra `serve` is missing, or an option is wrong.
    """
    try:
        import asyncio

        from dflash_jax.server.run import RunningServer, log_to_stderr, serve
    except ImportError as error:
        raise RequestError(
            f"serving needs more packages ({error}); {install_hint('serve')}"
        ) from error
    from dflash_jax.graph.background import BackgroundCompiler

    engines, config = configuration(options)
    if options.host not in ("127.0.0.1", "::1", "localhost") and not config.settings.api_keys:
        print(f"warning: open to the network without a key; set {KEYS}", file=sys.stderr)
    if "*" in options.cors and not config.settings.api_keys:
        print(f"warning: open to any web page without a key; set {KEYS}", file=sys.stderr)
    log_to_stderr(quiet=options.quiet)

    def started(running: RunningServer) -> None:
        print(f"listening on {running.url}", flush=True)

    compiler = BackgroundCompiler()
    asyncio.run(serve(engines, config, started=started, compiler=compiler))
    if compiler.compiling:
        _leave()
    return 0


def configuration(options: argparse.Namespace) -> tuple[dict[str, Callable[[], Any]], Any]:
    """Open the models of checked options; return what loads their engines, and `ServerConfig`.

    Raises:
      RequestError: a file of an option cannot be used.
      ConfigError, CheckpointError: a model is not supported, or damaged.
    """
    from dflash_jax.server.middleware import Settings
    from dflash_jax.server.run import ServerConfig

    pairs = _pairs(options)
    settings = Settings(
        api_keys=_keys(options.api_key_file),
        max_body=options.max_body,
        timeout=options.timeout if options.timeout > 0 else None,
        compile_wait=options.compile_wait,
        metrics=options.metrics,
        cors=tuple(options.cors),
        allowed_hosts=tuple(options.allowed_host),
        ui=not options.no_ui,
        aliases=_aliases(options),
        any_name=options.serve_any_name,
    )
    config = ServerConfig(
        host=options.host,
        port=options.port,
        drain=options.drain,
        warm=options.warm,
        defaults=_defaults(options),
        settings=settings,
    )
    use_compilation_cache()

    def make(pair: Any) -> Any:
        engine = pair.engine(_plan(options, pair))
        engine.grammars.seconds = options.grammar_timeout
        return engine

    return {name: functools.partial(make, pair) for name, pair in pairs.items()}, config


def _plan(options: argparse.Namespace, pair: Any) -> Any:
    """Return the plan of a model, by default with drafts reported for a page that shows them."""
    reports = not options.no_ui if options.report_drafts is None else options.report_drafts
    changes = {"queue": options.queue, "report_drafts": reports}
    return dataclasses.replace(conversation_plan(options, pair), **changes)


def _leave() -> None:
    """End the process at once: Python would wait for a compilation, which cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


def _first_name(options: argparse.Namespace) -> str:
    return options.name or Path(options.target).name or options.target


def _aliases(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return further names of models, each with the name of its model.

    Raises:
      RequestError: an alias is malformed, is taken, or names no model.
    """
    models = [_first_name(options), *(text.partition("=")[0] for text in options.model)]
    aliases: dict[str, str] = {}
    for text in options.alias:
        name, _, model = text.partition("=")
        if not name or name in (*models, *aliases) or model not in models:
            raise RequestError(
                f"--alias {text!r}: expected a new NAME=MODEL; models are {', '.join(models)}"
            )
        aliases[name] = model
    return tuple(aliases.items())


def _pairs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the opened models by name."""
    pairs = {_first_name(options): open_hosted(options)}
    for text in options.model:
        name, _, paths = text.partition("=")
        target, _, drafter = paths.partition(",")
        if not name or not target or name in pairs:
            raise RequestError(f"--model {text!r}: expected a new NAME=TARGET[,DRAFTER]")
        own = {"target": target, "drafter": drafter or "own", "tokenizer": None, "lora": None}
        pairs[name] = open_pair(argparse.Namespace(**vars(options) | own))
    return pairs


def _defaults(options: argparse.Namespace) -> Any:
    from dflash_jax.engine.state_machine import OFF, Recovery
    from dflash_jax.server.models import RequestDefaults

    from_environment = Recovery.from_environment(os.environ)
    chosen = {"off": (OFF, OFF), "tools": (OFF, Recovery()), "all": (Recovery(), Recovery())}
    named = (from_environment, from_environment) if from_environment != OFF else chosen["tools"]
    plain, with_tools = chosen[options.recovery] if options.recovery else named
    return RequestDefaults(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        recovery=plain,
        with_tools=with_tools,
    )


def _keys(file: Path | None) -> tuple[str, ...]:
    lines = os.environ.get(KEYS, "").split(",")
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--api-key-file {file} cannot be read: {error}") from error
    keys = tuple(key.strip() for key in lines if key.strip())
    if file is not None and not keys:
        raise RequestError(f"--api-key-file {file} holds no key; write one a line")
    return keys
