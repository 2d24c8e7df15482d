"""Options and steps shared by the commands. Heavy imports happen inside functions."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dflash_jax.declared import Declared
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.plan import Plan
from dflash_jax.serve_options import ServeOptions
from dflash_jax.utils.progress import announced, is_shown
from dflash_jax.utils.sources import check_exists

MODELS = ("target", "drafter", "layer_ids", "lora", "tokenizer")
SWITCHES = {"exact": "--inexact"}  # flags that turn a field off; --no-NAME for others
# Fields of a plan that the commands' common options do not set.
WITHOUT_FLAG = {
    "stored": "read from the weight files",
    "lookahead": "set in experiments only",
    "stop_slots": "the default suffices for the commands",
    "queue": "an option of `serve`, which counts running requests too",
    "prefix_folder": "an option of `serve`",
    "prefix_disk": "an option of `serve`",
}
PLAN_FLAGS = tuple(name for name in Plan.fields() if name not in WITHOUT_FLAG)
SAMPLING_FLAGS = tuple(name for name, field in SamplingParams.fields().items() if field.command)


def new_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
      run: runs the command and returns the exit code; JAX has been imported by then.
      check: checks the options before that; `check_values` by default, which others call first.
    """
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run, check=check or check_values)
    return command


def check_values(options: argparse.Namespace) -> None:
    """Check the options that can be checked before JAX is imported or a model opened."""
    if hasattr(options, "prompt_ids"):
        _check_prompt(options)
    if hasattr(options, "memory_limit"):
        chosen_plan(options)
    for name in ("target", "drafter", "tokenizer", "lora"):
        source = getattr(options, name, None)
        check_exists(source, "adapter" if name == "lora" else name)


def check_request(options: argparse.Namespace) -> None:
    """Check the options of generation as well, as `check_values` does."""
    check_values(options)
    sampling_params(options)


def sampling_options(group: Any, max_tokens: int | None = None, *, plain: bool = True) -> None:
    """Add the flags of a request's options, and with `plain` one for not drafting.

    Args:
      max_tokens: default of this option where it has one of its own.
    """
    add_flags(group, SamplingParams, SAMPLING_FLAGS)
    if max_tokens is not None:
        group.set_defaults(max_tokens=max_tokens)
    group.add_argument("--stop", action="append", default=[], help="text that ends the output")
    if plain:
        group.add_argument("--plain", action="store_true", help="decode without drafting")


def chosen_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of requests that the flags describe."""
    values = {name: getattr(options, name, None) for name in (*SAMPLING_FLAGS, "stop")}
    if getattr(options, "plain", False):
        values["speculative"] = False
    return {name: value for name, value in values.items() if value is not None}


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Return the parameters of requests that the flags describe.

    Raises:
      RequestError: a value is out of range, or two contradict each other.
    """
    return SamplingParams(**chosen_sampling(options))


def wanted_variant(options: argparse.Namespace) -> str:
    """Return the variant of programs to compile for the chosen options."""
    params = sampling_params(options)
    if params.penalized:
        return "penalized"
    return "sampled" if params.temperature > 0 else "greedy"


def model_options(command: Any) -> None:
    """Add the options that choose the models and the plan."""
    models = command.add_argument_group("models and plan")
    add_flags(models, ServeOptions, MODELS)
    add_flags(models, Plan, PLAN_FLAGS)
    models.add_argument(
        "--plan",
        dest="plan_file",
        metavar="FILE",
        help="JSON file of a plan, of `tune` or `Plan.to_json`; other options replace its fields",
    )
    command.defaults_by_file["--plan"] = _plan_defaults


def _plan_defaults(path: str) -> dict[str, Any]:
    """Return the options that the fields in a plan's file stand for; `tune` adds a drafter.

    Raises:
      OSError, PlanError: the file cannot be read, or has no plan.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the plan is not JSON ({error}); write it by `tune`") from error
    if not isinstance(values, dict):
        raise PlanError(f"the plan is {values!r}; expected one JSON object")
    drafter = values.pop("drafter", None)
    if drafter is not None and not isinstance(drafter, str):
        raise PlanError(f"drafter is {drafter!r}; expected a text, as of --drafter")
    plan = Plan.parse(values)
    options: dict[str, Any] = {"drafter": drafter} if drafter else {}
    options |= zip(("target_device", "drafter_device"), plan.devices, strict=True)
    for name in values.keys() - {"devices", "stored", "queue"}:  # see `WITHOUT_FLAG`
        options[name] = getattr(plan, name)
    return options


def add_flags(group: Any, declared: type[Declared], names: Iterable[str]) -> None:
    """Add the flags of declared fields, with the fields' defaults and help texts."""
    is_plan = declared is Plan
    for name in names:
        field = declared.fields()[name]
        default = field.default
        flag = "--" + name.replace("_", "-")
        flags = sorted([flag, *field.flags], key=lambda each: each.startswith("--"))  # -n first
        if name == "devices":
            for role in ("target", "drafter"):
                text = f"{field.help}; for the {role} (default: 0)"
                group.add_argument(
                    f"--{role}-device", type=int, default=0, metavar=field.metavar, help=text
                )
        elif default is True:
            off = SWITCHES.get(name, flag.replace("--", "--no-"))
            text = f"disable this default: {field.help}"
            group.add_argument(off, dest=name, action="store_false", help=text)
        elif default is False:
            switch = argparse.BooleanOptionalAction if is_plan else "store_true"
            group.add_argument(*flags, dest=name, action=switch, default=False, help=field.help)
        elif default == ():
            group.add_argument(
                *flags, dest=name, action="append", default=[], help=field.help,
                metavar=field.metavar,
            )  # fmt: skip
        else:
            described = field.automatic or default in ("", "auto") or not is_plan
            group.add_argument(
                *flags,
                dest=name,
                type=PARSERS.get(name, field.kind if field.kind in (int, float) else str),
                default="x".join(map(str, default)) if name == "mesh" else default,
                metavar=field.metavar,
                help=field.help if described else f"{field.help} (default: %(default)s)",
                choices=None if is_plan else field.choices or None,
            )


def mesh(text: str) -> tuple[int, int]:
    """Parse a mesh such as 1x4."""
    try:
        data, model = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; expected two numbers like 1x4") from error
    return data, model


PARSERS = {"mesh": mesh}  # parsers of fields that are neither texts nor numbers


def prompt_options(command: argparse.ArgumentParser) -> None:
    """Add the options that choose the prompt."""
    prompt = command.add_argument_group("prompt")
    prompt.add_argument("prompt", nargs="?", help="text; '-' reads it from standard input")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="raw token ids instead of text")
    prompt.add_argument("--system", help="system message, where the model has a chat template")
    prompt.add_argument(
        "--raw", action="store_true", help="feed the text as it is, without the chat template"
    )


def chosen_plan(options: argparse.Namespace) -> Plan:
    """Return the plan that the options describe; one that is None has its default."""
    names = Plan.fields().keys() - {"queue"}  # `--queue` of `serve` counts running requests, too
    values = {name: getattr(options, name, None) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    return Plan(**values, devices=(options.target_device, options.drafter_device))


def add_show_drafts(group: Any) -> None:
    """Add `--show-drafts`; commands with it set `report_drafts` by it, which the plan reads."""
    group.add_argument(
        "--show-drafts",
        action="store_true",
        help="mark accepted drafts, the target's own tokens and rejected drafts",
    )


def open_pair(options: argparse.Namespace) -> Any:
    """Open the chosen models without reading weights; warnings go to standard error."""
    from dflash_jax.server import configuration

    return configuration.open_pair(options, options.block, options.taps_at)


def load_engine(
    options: argparse.Namespace,
    prompts: Callable[[Any], list[list[int]]],
    *,
    quiet: bool,
    check: Callable[[Any, list[list[int]]], None] = lambda engine, ids: None,
    measure: bool = False,
) -> tuple[Any, list[list[int]]]:
    """Return a compiled engine and the ids of its prompts; progress goes to standard error.

    Without --max-length, the plan has room for the longest prompt and its output, rounded up to a
    power of two: the cost of attention on a CPU depends on it, and few sizes mean few compilations.

    Args:
      prompts: returns the prompts' ids by a tokenizer.
      quiet: report no progress.
      check: raises before compiling if the engine cannot run these prompts.
      measure: stop drafting where it does not pay off, as engines of `dflash_jax.load` do.
    """
    with report_progress("loading", quiet=quiet):
        use_compilation_cache()
        pair = open_pair(options)
        ids = prompts(pair.tokenizer)
        plan = chosen_plan(options)
        if not plan.max_length:
            need = max(map(len, ids)) + max(options.max_tokens, 1)
            capacity = max(256, 1 << (need - 1).bit_length())
            most = pair.configs[0].max_length
            plan = dataclasses.replace(plan, max_length=min(capacity, most))
        engine = pair.engine(plan)
        engine.measures_drafting = measure
        check(engine, ids)
    with report_progress("compiling", quiet=quiet):
        engine.warm_up(wanted_variant(options))
    return engine, ids


def report_progress(what: str, *, quiet: bool) -> contextlib.AbstractContextManager[None]:
    """Report on standard error what runs in the block."""
    return announced(what, shown=not quiet and is_shown(), patience=0)


def use_compilation_cache() -> None:
    """Use the compilation cache of `dflash_jax.load`; print a warning if that is impossible."""
    from dflash_jax.graph import cache
    from dflash_jax.server.configuration import to_stderr

    cache.use_compilation_cache(warn=to_stderr)


def prompt_ids(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    """Return the prompt's token ids; `check_values` has checked that there is a prompt."""
    if options.prompt_ids is not None:
        return _numbers(options.prompt_ids)
    text = options.prompt
    if text == "-":
        text = sys.stdin.read()
        if not options.raw:  # `echo` adds a line break
            text = text.removesuffix("\n")
    return encode_prompt(_not_empty(text), options, tokenizer)


def _check_prompt(options: argparse.Namespace) -> None:
    """Check that one prompt was given and is not empty; commands with --prompts need none."""
    if options.prompt_ids is not None:
        if options.prompt is not None:
            raise RequestError("both a prompt and --prompt-ids were given; give one of them")
        if not _numbers(options.prompt_ids):
            raise RequestError("the prompt is empty; give at least one token")
    elif options.prompt is not None:
        _not_empty(options.prompt)
    elif not hasattr(options, "prompts"):
        raise RequestError('no prompt; give a text, --prompt-ids 1,2,3, or "-" for standard input')


def _numbers(text: str) -> list[int]:
    """Return the token ids in a text like 1,2,3."""
    try:
        return [int(i) for i in text.split(",") if i.strip()]
    except ValueError as error:
        raise RequestError(f"--prompt-ids is {text!r}; expected integers like 1,2,3") from error


def _not_empty(text: str) -> str:
    if not text.strip():
        raise RequestError("the prompt is empty; give at least one character")
    return text


def encode_prompt(text: str, options: argparse.Namespace, tokenizer: Any) -> list[int]:
    """Return the ids of a text, in the chat template unless --raw was given."""
    if tokenizer is None:
        raise RequestError("this model ships no tokenizer; give --prompt-ids instead of text")
    if options.raw or tokenizer.template is None:
        return tokenizer.encode(text)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return tokenizer.chat([*system, {"role": "user", "content": text}])
