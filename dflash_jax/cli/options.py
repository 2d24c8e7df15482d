"""Options and steps shared by the commands. Heavy imports happen inside functions."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dflash_jax.declared import Field
from dflash_jax.engine.sampling_params import KINDS, OPTIONS, SamplingParams
from dflash_jax.errors import RequestError
from dflash_jax.plan import FIELDS, Plan
from dflash_jax.serve_options import FIELDS as SERVE_FIELDS
from dflash_jax.serve_options import ServeOptions
from dflash_jax.utils.progress import announced, is_shown
from dflash_jax.utils.sources import check_exists

MODELS = ("target", "drafter", "layer_ids", "lora", "tokenizer")
ALSO = {"cors_origin": ("--cors",)}  # further flags
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
    SamplingParams(**chosen_sampling(options))


def sampling_options(
    group: Any, max_tokens: int = OPTIONS["max_tokens"].default, *, plain: bool = True
) -> None:
    """Add the flags of a request's options, and with `plain` one for not drafting."""
    for name, info in OPTIONS.items():
        flags = ["-n"] * (name == "max_tokens") + ["--" + name.replace("_", "-")]
        if info.command and KINDS[name] is bool:
            group.add_argument(*flags, action="store_true", help=info.help)
        elif info.command:
            default = max_tokens if name == "max_tokens" else info.default
            group.add_argument(*flags, type=KINDS[name], default=default, help=info.help)
    group.add_argument("--stop", action="append", default=[], help="text that ends the output")
    if plain:
        group.add_argument("--plain", action="store_true", help="decode without drafting")


def chosen_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of requests that the flags describe."""
    names = [name for name, info in OPTIONS.items() if info.command]
    given = {name: getattr(options, name, None) for name in (*names, "stop")}
    given |= {"speculative": False} if getattr(options, "plain", False) else {}
    return {name: value for name, value in given.items() if value is not None}


def wanted_variant(options: argparse.Namespace) -> str:
    """Return the variant of programs to compile for the chosen options."""
    params = SamplingParams(**chosen_sampling(options))
    return "penalized" if params.penalized else "sampled" if params.temperature > 0 else "greedy"


def model_options(command: Any) -> None:
    """Add the options that choose the models and the plan."""
    models = command.add_argument_group("models and plan")
    add_flags(models, ServeOptions, SERVE_FIELDS, MODELS)
    add_flags(models, Plan, FIELDS, [name for name in FIELDS if name not in WITHOUT_FLAG])
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
      OSError, UnicodeError, PlanError: the file cannot be read, or has no plan.
    """
    text = Path(path).read_text(encoding="utf-8")
    with contextlib.suppress(ValueError):
        fields = json.loads(text)
        if isinstance(fields, dict) and (drafter := fields.pop("drafter", None)):
            return _plan_fields(json.dumps(fields)) | {"drafter": drafter}
    return _plan_fields(text)


def _plan_fields(text: str) -> dict[str, Any]:
    plan = Plan.from_json(text)
    found = {name: getattr(plan, name) for name in json.loads(text)}
    places = found.pop("devices", plan.devices)
    found |= zip(("target_device", "drafter_device"), places, strict=True)
    for name in ("stored", "queue"):  # the models' own, and an option of `serve`
        found.pop(name, None)
    return found


def add_flags(
    group: Any, declared: type, fields: Mapping[str, Field], names: Iterable[str]
) -> None:
    """Add the flags of declared fields, with the fields' defaults and help texts."""
    hints = get_type_hints(declared)
    for name in names:
        info, default = fields[name], getattr(declared, name)
        flag = "--" + name.replace("_", "-")
        if default is True:
            flag = SWITCHES.get(name, flag.replace("--", "--no-"))
            group.add_argument(
                flag, dest=name, action="store_false", help=f"disable this default: {info.help}"
            )
            continue
        if default is False:
            switch = argparse.BooleanOptionalAction if declared is Plan else "store_true"
            group.add_argument(flag, action=switch, default=default, help=info.help)
            continue
        if name == "devices":
            for role in ("target", "drafter"):
                text = f"{info.help}; for the {role} (default: 0)"
                group.add_argument(
                    f"--{role}-device", type=int, default=0, metavar=info.metavar, help=text
                )
            continue
        if default == ():
            group.add_argument(
                flag, *ALSO.get(name, ()), action="append", default=[], help=info.help,
                metavar=info.metavar,
            )  # fmt: skip
            continue
        if name == "mesh":
            default = "x".join(map(str, default))
        kinds = (hints[name], *get_args(hints[name]))
        kind: Any = next((x for x in (int, float) if x in kinds), str)
        described = info.automatic or default in ("", "auto") or declared is not Plan
        choices = None if declared is Plan else _choices(hints[name])
        group.add_argument(
            flag,
            type=mesh if name == "mesh" else kind,
            default=default,
            metavar=info.metavar,
            help=info.help if described else f"{info.help} (default: %(default)s)",
            choices=choices,
        )


def _choices(hint: Any) -> tuple[str, ...] | None:
    """Return the values of a Literal, which None may be added to; None for other types."""
    literals = [x for x in (hint, *get_args(hint)) if get_origin(x) is Literal]
    return get_args(literals[0]) if literals else None


def mesh(text: str) -> tuple[int, int]:
    """Parse a mesh such as 1x4."""
    try:
        data, model = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; expected two numbers like 1x4") from error
    return data, model


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
    names = FIELDS.keys() - {"queue"}  # `--queue` of `serve` counts running requests as well
    given = {name: getattr(options, name, None) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return Plan(**given, devices=(options.target_device, options.drafter_device))


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
      prompts: encodes the prompts, given the tokenizer.
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
        return _given_ids(options.prompt_ids)
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
        if not _given_ids(options.prompt_ids):
            raise RequestError("the prompt is empty; give at least one token")
    elif options.prompt is not None:
        _not_empty(options.prompt)
    elif not hasattr(options, "prompts"):
        raise RequestError('no prompt; give a text, --prompt-ids 1,2,3, or "-" for standard input')


def _given_ids(text: str) -> list[int]:
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
