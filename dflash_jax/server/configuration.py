"""Open the models that `ServeOptions` name, and configure the server."""

import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.plan import Plan
from dflash_jax.serve_options import ServeOptions, read_config
from dflash_jax.server.keys import ApiKey, Report, keys_of, read_keys, warn_of_readers

LONGEST = 4096  # default capacity of conversations; more would be slower on a CPU


def normalized(options: ServeOptions, report: Report = lambda message: None) -> ServeOptions:
    """Check all that can be checked before JAX is imported, and bring names of hosts to one form.

    Args:
      report: takes a warning about files with keys.

    Raises:
      CheckpointError: a model or tokenizer does not exist.
      RequestError: a value is wrong.
    """
    from dflash_jax.server import access

    options.check_files()
    accepted_keys(options, report)
    _recovery(options)
    return dataclasses.replace(
        options,
        allowed_host=tuple(map(access.allowed_host, options.allowed_host)),
        cors_origin=tuple(map(access.cors_origin, options.cors_origin)),
    )


def accepted_keys(options: ServeOptions, report: Report) -> tuple[ApiKey, ...]:
    """Return the API keys of the environment and of the files that options name.

    Raises:
      RequestError: a file cannot be read, or has a wrong key.
    """
    more: list[ApiKey] = []
    if options.config is not None:
        table = read_config(options.config).get("keys", {})
        if not isinstance(table, Mapping):
            raise RequestError(f"{options.config}: keys is no table; write [keys] before them")
        more = keys_of(table, options.config)
        if more:
            warn_of_readers(options.config, report)
    return read_keys(options.api_key_file, more, report=report)


def configuration(
    options: ServeOptions, report: Report | None = None
) -> tuple[dict[str, Callable[[], Any]], Any]:
    """Open the models of checked options; return what loads their engines, and `ServerConfig`.

    Args:
      report: takes warnings; by default `to_stderr`.

    Raises:
      RequestError: a file of an option cannot be used.
      ConfigError, CheckpointError: a model is not supported, or damaged.
    """
    from dflash_jax import distributed
    from dflash_jax.engine.turns.group_turns import publish_turns
    from dflash_jax.engine.turns.recording import record_turns
    from dflash_jax.graph import cache
    from dflash_jax.server import serving_hosts
    from dflash_jax.server.served_models import ServerConfig

    report = report or to_stderr
    keys = functools.partial(accepted_keys, options, report)
    pairs = _pairs(options, report)
    plain, with_tools = _recovery(options)
    config = ServerConfig(
        **vars(options),
        api_keys=keys(),
        read_keys=keys,
        plain_recovery=plain,
        tool_recovery=with_tools,
    )
    cache.use_compilation_cache(warn=report)

    def make(pair: Any) -> Any:
        plan = planned(options, pair)
        group = distributed.current()
        if group.size > 1:
            engine = serving_hosts.load(pair, plan, group)
            publish_turns(engine, group)
        else:
            engine = pair.engine(plan)
        engine.core.grammars.seconds = options.grammar_timeout
        if options.record is not None:
            record_turns(engine, Path(options.record).expanduser())
        return engine

    return {name: functools.partial(make, pair) for name, pair in pairs.items()}, config


def to_stderr(message: str) -> None:
    """Print a warning to standard error."""
    sys.stderr.write(f"dflash-jax: {message}\n")


def open_pair(options: Any, block: int, taps_at: str, report: Report = to_stderr) -> Any:
    """Open the models of `target` and `drafter` without reading weights.

    Args:
      options: with the fields of `ServeOptions` that choose models.
      block, taps_at: of the plan.
      report: takes warnings.
    """
    from dflash_jax import loading

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = loading.open_pair(
            options.target,
            None if options.drafter == "none" else options.drafter,
            layer_ids=options.layer_ids,
            taps_at=taps_at,
            lora=options.lora,
            tokenizer=options.tokenizer,
        )
    for message in [*(str(warning.message) for warning in caught), pair.wide_block(block)]:
        if message:
            report(message)
    return dataclasses.replace(pair, report=report)


def served_plan(plan: Plan, target: Any) -> Plan:
    """Return a plan with the capacity that a server gives to conversations by default."""
    longest = getattr(target, "max_length", LONGEST)
    return dataclasses.replace(plan, max_length=plan.max_length or min(LONGEST, longest))


def planned(options: ServeOptions, pair: Any) -> Any:
    """Return the plan of a model, by default with drafts reported for a page that shows them."""
    plan = options.plan
    reports = options.report_drafts
    if not plan.max_length:
        plan = served_plan(plan, pair.configs[0])
    return dataclasses.replace(
        plan,
        queue=options.queue,
        report_drafts=not options.no_ui if reports is None else reports,
    )


def _pairs(options: ServeOptions, report: Report) -> dict[str, Any]:
    pairs = {options.first_name: opened(options, report)}
    for name, (target, drafter) in options.models.items():
        other = dataclasses.replace(
            options, target=target, drafter=drafter, tokenizer=None, lora=None, name=None, model=(),
            alias=(),
        )  # fmt: skip
        pairs[name] = opened(other, report)
    return pairs


def opened(options: ServeOptions, report: Report = to_stderr) -> Any:
    """Open the first model of options, see `open_pair`."""
    return open_pair(options, options.plan.block, options.plan.taps_at, report)


def _recovery(options: ServeOptions) -> tuple[Any, Any]:
    """Return the rules for requests without tools, and for those with tools."""
    from dflash_jax.engine.state_machine import OFF, Recovery

    rules = Recovery.from_environment(os.environ)
    return {"off": (OFF, OFF), "tools": (OFF, rules), "all": (rules, rules)}[options.recovery]
