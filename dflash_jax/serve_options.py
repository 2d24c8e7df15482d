"""The options of a server, declared as those of a plan are.

Flags of `dflash-jax serve` and keys of Ray applications are derived from the declarations. This
module never imports JAX, so that a command can check options before JAX starts.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from dflash_jax.declared import Field, unknown_names
from dflash_jax.errors import CheckpointError, RequestError
from dflash_jax.plan import FIELDS as PLAN_FIELDS
from dflash_jax.plan import Plan
from dflash_jax.utils.sources import check_exists

PREFIX_CACHE = 2**28  # bytes; every turn of a conversation extends the last
DEFAULT_PLAN = Plan(prefix_cache=PREFIX_CACHE)
Texts = tuple[str, ...]


def serve_field(default: Any, help: str, **info: Any) -> Any:
    """Return a dataclass field with a default and the declaration of the other arguments."""
    return dataclasses.field(default=default, metadata={"serve": Field(help=help, **info)})


# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `dflash-jax serve`; the plan is that of each model, with its own queue.

    Raises:
      RequestError: a value is wrong, or options contradict each other.
    """

    plan: Plan = DEFAULT_PLAN
    config: str | None = serve_field(
        None,
        "TOML file with options by the names of their flags, and tables of models, aliases and API"
        " keys; other flags replace what it says",
        metavar="FILE",
    )
    report_drafts: bool | None = None  # of the plan; None where a page shows them
    target: str = serve_field(
        "tiny", "directory, .gguf file, hub id, 'smollm2', or 'tiny' (default)",
    )
    drafter: str = serve_field(
        "own",
        "directory, .gguf file or hub id; 'auto' for the one published for the target, 'ngram'"
        " for drafts from the text itself, 'none' for none (default: the shipped target's own)",
    )
    layer_ids: Literal["auto", "zero-based", "one-based"] = serve_field(
        "auto", "how the drafter's file numbers target layers, where that is ambiguous",
    )
    lora: str | None = serve_field(
        None, "PEFT adapter that is added to the target's weights", metavar="DIR",
    )
    tokenizer: str | None = serve_field(
        None, "folder with tokenizer.json, where the target's own cannot be used", metavar="DIR",
    )
    host: str = serve_field(
        "127.0.0.1", "default: 127.0.0.1; 0.0.0.0 listens on every interface",
    )
    port: int = serve_field(8000, "default: 8000; 0 takes a free one", maximum=2**16 - 1)
    metrics_port: int | None = serve_field(
        None,
        "another port of the same host for /metrics, /health and /ready, which need no key there;"
        " the other one has no /metrics then (0 takes a free one)",
        maximum=2**16 - 1, metavar="PORT",
    )
    name: str | None = serve_field(None, "the first model's name; its target's by default")
    model: Texts = serve_field(
        (), "another pair to serve; requests choose models by name (repeatable)",
        metavar="NAME=TARGET[,DRAFTER]",
    )
    alias: Texts = serve_field(
        (), "another name for a served model, such as claude-sonnet=tiny (repeatable)",
        metavar="NAME=MODEL",
    )
    serve_any_name: bool = serve_field(
        False,
        "answer requests for models of any other name, too; responses repeat that name",
    )
    queue: int = serve_field(64, "most outputs that wait or run (default 64)", minimum=1)
    timeout: float = serve_field(
        600.0, "seconds per request (default 600; 0: no limit)", minimum=-1e9, maximum=1e9,
    )
    drain: float = serve_field(
        30.0, "seconds for running requests after SIGTERM (default 30)", maximum=1e9,
    )
    max_body: int | None = serve_field(
        None,
        "limit of request bodies (default: 64 bytes per token of the longest context, at least"
        " 4 and at most 32 MiB)",
        minimum=1, metavar="BYTES",
    )
    max_bodies: int | None = serve_field(
        None,
        "limit of all request bodies together that are held at a time (default: 256 MiB, or four"
        " times --max-body if that is more)",
        minimum=1, metavar="BYTES",
    )
    hosts: int = serve_field(
        1,
        "one model over N worker processes, whose devices --mesh splits it over (by default"
        " kv heads, and rows over the rest); without --ray all of them on this machine",
        minimum=1, metavar="N",
    )
    ray: str | None = serve_field(
        None,
        "place the workers of --hosts on a Ray cluster, one per node if there are enough:"
        " HOST:PORT, auto, or local to start one",
        metavar="ADDRESS",
    )
    max_tokens: int = serve_field(
        0, "of requests without max_tokens (0: all that fits; 16 for completions)",
    )
    temperature: float = serve_field(0.0, "of requests without temperature (0: greedy)")
    recovery: Literal["off", "tools", "all"] | None = serve_field(
        None,
        "requests that use dj.Recovery() unless they set recovery themselves: by default those"
        " with tools; all, with the rules of DFLASH_MIN_TOKENS, DFLASH_STALL_TOOL_PREFIX and"
        " DFLASH_DEGENERATE_RUN_TOKENS, if one of these variables is set",
    )
    api_key_file: str | None = serve_field(
        None,
        "file with an API key a line, as KEY or as NAME: KEY rpm=60 tpm=90000 parallel=4, and"
        " comments after #; SIGHUP has it read again. Or set DFLASH_API_KEY to such keys separated"
        " by commas",
    )
    share_prefixes: bool = serve_field(
        False,
        "let requests of all API keys use one prefix cache; by default each key has its own, since"
        " the number of cached tokens tells what others have sent",
    )
    allowed_host: Texts = serve_field(
        (),
        "additional name to accept in Host headers (repeatable). Loopback names and --host are"
        " always accepted; *.NAME accepts all subdomains, and * every name, which is the default"
        " with an API key",
        metavar="NAME",
    )
    cors_origin: Texts = serve_field(
        (), "origin whose web pages may use the server, * for any (repeatable)", metavar="ORIGIN",
    )
    metrics: bool = serve_field(False, "add statistics to every response")
    no_ui: bool = serve_field(False, "serve no web page at /")
    quiet: bool = serve_field(False, "no log line for requests that went well")
    log_format: Literal["text", "json"] = serve_field(
        "text", "how to write log lines, of which each request has one (default: text)",
    )
    warm: Literal["none", "common", "all"] = serve_field(
        "common",
        "programs to compile before /ready: none compiles greedy ones, common (default) also"
        " sampled ones, and those for recovery, structured output, penalties and log probabilities"
        " in the background afterwards; all compiles all of them",
    )
    compile_wait: float = serve_field(
        50.0,
        "how long a request waits for programs to be compiled before it gets a 503 with"
        " Retry-After (default 50); streams get comments instead",
        maximum=1e9, metavar="SECONDS",
    )
    grammar_timeout: float = serve_field(
        30.0,
        "how long a JSON schema or grammar of a request may take to compile (default 30)"
        " before it gets a 400; other requests are not delayed",
        minimum=1e-3, maximum=1e9, metavar="SECONDS",
    )
    # fmt: on

    def __post_init__(self) -> None:
        for name, info in FIELDS.items():
            kind, optional = KINDS[name]
            value = getattr(self, name)
            if kind == Texts or (value is None and optional):
                continue
            if expected := info.mismatch(value, kind):
                raise RequestError(f"{flag(name)} is {value!r}; expected {expected}")
        _ = self.models
        _ = self.aliases
        if self.metrics_port and self.metrics_port == self.port:
            raise RequestError(f"--metrics-port is {self.port}, as --port is; give another one")
        one = self.max_body
        together = self.max_bodies
        if one is not None and together is not None and together < one:
            raise RequestError(f"--max-bodies is {together}; expected at least --max-body, {one}")
        self._check_hosts()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ServeOptions":
        """Return options from values or texts by name; fields of the plan are among them.

        Raises:
          RequestError: a name is unknown, or a value is wrong.
          PlanError: fields of the plan contradict each other.
        """
        own: dict[str, Any] = {}
        plan: dict[str, Any] = {"prefix_cache": PREFIX_CACHE}
        named = {key.replace("-", "_"): value for key, value in given.items()}
        if file := named.get("config"):
            named = config_options(file) | named
        if wrong := unknown_names(named, OPTIONS, "option of `dflash-jax serve`"):
            raise RequestError(wrong)
        for name, value in named.items():
            if name in KINDS or name == "report_drafts":
                own[name] = _converted(name, value, *KINDS.get(name, (bool, True)))
            else:
                plan[name] = _converted(name, value, type(getattr(Plan, name)), False)
        return cls(plan=Plan(**plan), **own)

    @property
    def first_name(self) -> str:
        """Name of the first model."""
        return self.name or Path(self.target).name or self.target

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Further names of models, each with the name of its model.

        Raises:
          RequestError: an alias is malformed, is taken, or names no model.
        """
        models = [self.first_name, *self.models]
        aliases: dict[str, str] = {}
        for text in self.alias:
            name, _, model = text.partition("=")
            if not name or name in (*models, *aliases) or model not in models:
                raise RequestError(
                    f"--alias {text!r}: expected a new NAME=MODEL; models are {', '.join(models)}"
                )
            aliases[name] = model
        return tuple(aliases.items())

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        """Target and drafter of all models but the first, by name.

        Raises:
          RequestError: one is malformed, or two have one name.
        """
        found: dict[str, tuple[str, str]] = {}
        for text in self.model:
            name, _, pair = text.partition("=")
            target, _, drafter = pair.partition(",")
            if not name or not target or name in (self.first_name, *found):
                raise RequestError(f"--model {text!r}: expected a new NAME=TARGET[,DRAFTER]")
            found[name] = target, drafter or "own"
        return found

    def check_files(self) -> None:
        """Raise CheckpointError if a model or tokenizer does not exist."""
        for name in ("target", "drafter", "tokenizer", "lora"):
            source = getattr(self, name)
            check_exists(source, "adapter" if name == "lora" else name)
        for name, (target, drafter) in self.models.items():
            try:
                check_exists(target, "target")
                check_exists(drafter, "drafter")
            except CheckpointError as error:
                raise CheckpointError(f"model {name}: {error}") from None

    def _check_hosts(self) -> None:
        """Check the options of several hosts."""
        if self.ray is not None and self.hosts < 2:
            raise RequestError(
                f"--hosts is {self.hosts} with --ray; expected a number of processes, at least 2"
            )
        if self.hosts == 1:
            return
        plan = self.plan
        refused = {
            "--model": bool(self.model),
            "--prefix-folder": bool(plan.prefix_folder),
            "--target-device and --drafter-device": plan.two_devices,
            "--weights other than float": plan.weights not in ("auto", "float"),
            "--kernels native": plan.kernels == "native",
            "--activations int8": plan.activations == "int8",
            "--steps-per-call above 1": plan.steps_per_call > 1,
            "--weight-layout": plan.weight_layout not in ("auto", "row_major"),
        }
        for name, given in refused.items():
            if given:
                raise RequestError(
                    f"{name} cannot be used with --hosts {self.hosts}; leave it out, or serve the"
                    " model from one process"
                )
        data, model = plan.mesh
        if data * model > 1 and data * model % self.hosts:
            raise RequestError(
                f"--mesh {data}x{model} has {data * model} devices, which {self.hosts} hosts cannot"
                f" share equally; give a multiple of {self.hosts}, or leave it out"
            )


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was allowed."""
    if type(None) not in get_args(hint):
        return hint, False
    return next(kind for kind in get_args(hint) if kind is not type(None)), True


FIELDS: Mapping[str, Field] = {
    field.name: field.metadata["serve"]
    for field in dataclasses.fields(ServeOptions)
    if field.metadata
}
KINDS: Mapping[str, tuple[Any, bool]] = {
    name: _kind(hint) for name, hint in get_type_hints(ServeOptions).items() if name in FIELDS
}


OPTIONS = tuple(dict.fromkeys([*FIELDS, "report_drafts", *PLAN_FIELDS]))


def read_config(path: str) -> dict[str, Any]:
    """Return the contents of a configuration file, with '_' for '-' in names.

    Raises:
      RequestError: it cannot be read, or is no TOML.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # no text, and wrong TOML
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path} cannot be read: {reason}") from None
    return {name.replace("-", "_"): value for name, value in table.items()}


def config_options(path: str) -> dict[str, Any]:
    """Return the options in a configuration file, by name; its keys are read by `server.keys`.

    Tables of models and aliases become what their flags take. Without `target`, the first of the
    models is the default one.

    Raises:
      RequestError: it cannot be read, or has a wrong model, alias or table.
    """
    found = read_config(path)
    found.pop("keys", None)
    models = found.get("model")
    if isinstance(models, Mapping):
        pairs = {name: _model(name, entry) for name, entry in models.items()}
        if pairs and "target" not in found:
            first = next(iter(pairs))
            target, drafter = pairs.pop(first)
            found |= {"name": first, "target": target, "drafter": drafter}
        found["model"] = [f"{name}={','.join(pair)}" for name, pair in pairs.items()]
    aliases = found.get("alias")
    if isinstance(aliases, Mapping):
        found["alias"] = [f"{name}={model}" for name, model in aliases.items()]
    for name, value in found.items():
        if isinstance(value, Mapping):
            raise RequestError(
                f"{path} has a table [{name}]; expected [model.NAME], [alias] or [keys], and"
                " options before the first table"
            )
    return found


def _model(name: str, entry: Any) -> tuple[str, str]:
    """Return target and drafter of a table of a configuration file."""
    pair = {"drafter": "own"} | (dict(entry) if isinstance(entry, Mapping) else {"target": entry})
    if wrong := unknown_names(pair, ("target", "drafter"), f"field of [model.{name}]"):
        raise RequestError(wrong)
    target, drafter = pair.get("target"), pair["drafter"]
    if not isinstance(target, str) or not isinstance(drafter, str) or "," in target:
        raise RequestError(
            f"[model.{name}] has target {target!r} and drafter {drafter!r}; expected texts, without"
            " a comma in the target's"
        )
    return target, drafter


def flag(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def _converted(name: str, value: Any, kind: Any, optional: bool) -> Any:
    """Return a value that may be a text as the type of an option."""
    if value is None and optional:
        return None
    try:
        if kind == Texts:
            return tuple(map(str, value if isinstance(value, list | tuple) else [value]))
        if kind is tuple:
            parts = re.split("[x,]", value) if isinstance(value, str) else value
            return tuple(map(int, parts))
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if isinstance(value, bool | list | dict):
            raise TypeError
        if kind is int and not isinstance(value, int | str):
            raise TypeError
        return kind(value) if kind in (int, float) else str(value)
    except (ValueError, KeyError, TypeError):
        names = {int: "an integer", float: "a number", bool: "true or false"}
        expected = names.get(kind, "two numbers like 1x4" if kind is tuple else "a text")
        raise RequestError(f"{name} is {value!r}; expected {expected}") from None
