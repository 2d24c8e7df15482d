"""Options and steps that several verbs share. Heavy imports happen inside functions."""

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.plan import FIELDS, Plan
from dflash_jax.utils.deprecation import add_deprecated_flag
from dflash_jax.utils.progress import announced, is_shown
from dflash_jax.utils.sources import find_local

LONGEST = 4096  # default capacity of conversations; a longer one costs time on a CPU
SWITCHES = {"exact": "--inexact"}  # flags that turn a field off; --no-NAME for others
# Fields of a plan that the verbs' common options do not set.
WITHOUT_FLAG = {
    "stored": "read from the weight files",
    "lookahead": "0 only serves to debug",
    "stop_slots": "requests choose among stop tokens, not commands",
    "queue": "an option of `serve`, which counts running requests too",
    "prefix_folder": "an option of `serve`",
    "prefix_disk": "an option of `serve`",
}


def new_verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.ArgumentParser:
    """Add a verb and return its parser.

    Args:
      run: does the work, returns the exit code; JAX is imported by then.
      check: refuses wrong values before; `check_values` by default, which others call first.
    """
    verb = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(run=run, check=check or check_values)
    return verb


def check_values(options: argparse.Namespace) -> None:
    """Refuse what is wrong whatever the models are, before JAX is imported or a model opened.

    Raises:
      CheckpointError: there is no such model or tokenizer.
      PlanError: the plan's options contradict themselves.
      RequestError: the prompt is missing, empty or given twice.
    """
    if hasattr(options, "prompt_ids"):
        _check_prompt(options)
    if hasattr(options, "memory_limit"):
        chosen_plan(options)
    for role in ("target", "drafter", "tokenizer"):
        source = getattr(options, role, None)
        if source is not None and not (role == "drafter" and source in ("auto", "none")):
            find_local(source, role)


def check_request(options: argparse.Namespace) -> None:
    """Do the same for the options that say what to generate; RequestError names a wrong one."""
    from dflash_jax.engine.request import Request

    check_values(options)
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    given = {name: getattr(options, name, None) for name in names}
    stop = tuple(getattr(options, "stop", ()))
    fields = {name: value for name, value in given.items() if value is not None}
    Request(prompt=(0,), stop=stop, **fields)


def model_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that choose the models and the plan."""
    models = verb.add_argument_group("models and plan")
    models.add_argument(
        "--target", default="tiny", help="directory, .gguf file, hub id, or 'tiny' (default)"
    )
    models.add_argument(
        "--drafter",
        default="auto",
        help="directory, .gguf file or hub id; 'none' for no drafter (default: tiny's own)",
    )
    numbering = models.add_argument(
        "--layer-ids",
        choices=("auto", "zero-based", "one-based"),
        default="auto",
        help="how the drafter's file numbers target layers, where that is ambiguous",
    )
    add_deprecated_flag(models, numbering)
    models.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder with tokenizer.json, where the target's own cannot be used",
    )
    add_plan_options(models, [name for name in FIELDS if name not in WITHOUT_FLAG])


def add_plan_options(group: Any, names: Iterable[str]) -> None:
    """Add the flags of fields of a plan, with the fields' defaults and help texts."""
    for name in names:
        info, default = FIELDS[name], getattr(Plan, name)
        flag = "--" + name.replace("_", "-")
        if default is True:
            flag = SWITCHES.get(name, flag.replace("--", "--no-"))
            group.add_argument(
                flag, dest=name, action="store_false", help=f"disable this default: {info.help}"
            )
            continue
        if name == "devices":
            for role in ("target", "drafter"):
                text = f"{info.help}; for the {role} (default: 0)"
                group.add_argument(
                    f"--{role}-device", type=int, default=0, metavar=info.metavar, help=text
                )
            continue
        if name == "mesh":
            default = "x".join(map(str, default))
        said = info.automatic or default in ("", "auto")
        action = group.add_argument(
            flag,
            type=mesh if name == "mesh" else type(default),
            default=default,
            metavar=info.metavar,
            help=info.help if said else f"{info.help} (default: %(default)s)",
        )
        add_deprecated_flag(group, action)


def mesh(text: str) -> tuple[int, int]:
    try:
        data, model = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; expected two numbers like 1x4") from error
    return data, model


def prompt_options(verb: argparse.ArgumentParser) -> None:
    prompt = verb.add_argument_group("prompt")
    prompt.add_argument("prompt", nargs="?", help="text; '-' reads standard input")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="raw token ids instead of text")
    prompt.add_argument("--system", help="system message, where the model has a chat template")
    prompt.add_argument(
        "--raw", action="store_true", help="feed the text as it is, without the chat template"
    )


def chosen_plan(options: argparse.Namespace) -> Plan:
    """Return the plan that the options describe.

    Raises:
      PlanError: a value is wrong, or options contradict each other.
    """
    names = FIELDS.keys() - {"queue"}  # `--queue` of `serve` counts running requests as well
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return Plan(**given, devices=(options.target_device, options.drafter_device))


def conversation_plan(options: argparse.Namespace, pair: Any) -> Any:
    """The chosen plan with room for a conversation, where --max-length says nothing."""
    plan = chosen_plan(options)
    length = plan.max_length or min(LONGEST, pair.configs[0].max_length)
    return dataclasses.replace(plan, max_length=length)


def chosen_drafter(options: argparse.Namespace) -> str | None:
    return None if options.drafter == "none" else options.drafter


def open_pair(options: argparse.Namespace) -> Any:
    """The chosen models, not yet read; doubts are told on standard error."""
    from dflash_jax import loading
    from dflash_jax.compiler.resolve import wide_block

    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always")
        pair = loading.open_pair(
            options.target,
            chosen_drafter(options),
            taps=options.layer_ids,
            taps_at=options.taps_at,
            tokenizer=options.tokenizer,
        )
    found = [str(doubt.message) for doubt in doubts]
    if note := wide_block(options.block, pair.configs[1]):
        found.append(note)
    for doubt in found:
        print(f"dflash-jax: {doubt}", file=sys.stderr)
    return pair


def load_engine(
    options: argparse.Namespace,
    prompts: Callable[[Any], list[list[int]]],
    *,
    quiet: bool,
    check: Callable[[Any, list[list[int]]], None] = lambda engine, ids: None,
    sampled: bool = False,
) -> tuple[Any, list[list[int]]]:
    """A warm engine and the prompts it is for; says on standard error what takes time.

    Without --max-length the plan holds the longest prompt and its output, rounded up to a
    power of two: attention on a CPU costs by capacity, and few capacities mean few compilations.

    Args:
      prompts: makes the prompts' ids from the tokenizer.
      check: refuses what this engine cannot do with them, before compiling takes its time.
      sampled: compile the sampling programs as well.
    """
    with telling("loading", quiet=quiet):
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
        check(engine, ids)
    with telling("compiling", quiet=quiet):
        engine.warm_up(sampled=sampled)
    return engine, ids


@contextlib.contextmanager
def telling(what: str, *, quiet: bool) -> Iterator[None]:
    with announced(what, shown=not quiet and is_shown(), patience=0):
        yield


def use_compilation_cache() -> None:
    """Keep compiled programs where `dflash_jax.load` does; says so where that cannot be."""
    from dflash_jax.compiler import cache

    cache.use_compilation_cache(warn=lambda text: print(f"dflash-jax: {text}", file=sys.stderr))


def prompt_ids(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    """The prompt's token ids; `check_values` has seen to it that there is one."""
    if options.prompt_ids is not None:
        return _given_ids(options.prompt_ids)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    return encode_prompt(_some(text), options, tokenizer)


def _check_prompt(options: argparse.Namespace) -> None:
    """Refuse a prompt that is missing, empty or given twice; verbs with --prompts need none."""
    if options.prompt_ids is not None:
        if options.prompt is not None:
            raise RequestError("both a prompt and --prompt-ids were given; give one of them")
        if not _given_ids(options.prompt_ids):
            raise RequestError("the prompt is empty; give at least one token")
    elif options.prompt is not None:
        _some(options.prompt)
    elif not hasattr(options, "prompts"):
        raise RequestError('no prompt; give a text, --prompt-ids 1,2,3, or "-" for standard input')


def _given_ids(text: str) -> list[int]:
    try:
        return [int(i) for i in text.split(",") if i.strip()]
    except ValueError as error:
        raise RequestError(f"--prompt-ids is {text!r}; expected integers like 1,2,3") from error


def _some(text: str) -> str:
    if not text.strip():
        raise RequestError("the prompt is empty; give at least one character")
    return text


def encode_prompt(text: str, options: argparse.Namespace, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise RequestError("this model ships no tokenizer; give --prompt-ids instead of text")
    if options.raw or tokenizer.template is None:
        return tokenizer.encode(text)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return tokenizer.chat([*system, {"role": "user", "content": text}])
