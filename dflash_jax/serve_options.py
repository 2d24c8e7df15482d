"""The options of a server: flags of `dflash-jax serve`, which its file and Ray take by name.

This module never imports JAX, so that a command can check options before JAX starts.
"""

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dflash_jax.declared import Declared, Texts, declare, document, sentences, unknown_names
from dflash_jax.engine.sampling_params import MAX_INT, MAX_TEMPERATURE
from dflash_jax.errors import CheckpointError, RequestError
from dflash_jax.plan import Plan
from dflash_jax.utils.addresses import split_address
from dflash_jax.utils.sources import check_exists

PREFIX_CACHE = 2**28  # bytes; every turn of a conversation extends the last
DEFAULT_PLAN = Plan(prefix_cache=PREFIX_CACHE)


# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(Declared):
    """Options of `dflash-jax serve`; the plan is that of each model, with its own queue."""

    _error = RequestError
    _noun = "option of `dflash-jax serve`"

    plan: Plan = DEFAULT_PLAN
    config: str | None = declare(
        None,
        "TOML file with options by the names of their flags, and tables of models, aliases and API"
        " keys; other flags replace what it says",
        metavar="FILE",
    )
    report_drafts: bool | None = declare(
        None, "report drafts as the plan's field does; by default where there is a web page"
    )
    target: str = declare(
        "tiny", "directory, .gguf file, hub id, 'smollm2', or 'tiny' (default)",
    )
    drafter: str = declare(
        "own",
        "directory, .gguf file or hub id; 'auto' for the one published for the target, 'ngram'"
        " for drafts from the text itself, 'none' for none (default: the shipped target's own)",
    )
    layer_ids: Literal["auto", "zero-based", "one-based"] = declare(
        "auto", "how the drafter's file numbers target layers, where that is ambiguous",
    )
    lora: str | None = declare(
        None, "PEFT adapter that is added to the target's weights", metavar="DIR",
    )
    tokenizer: str | None = declare(
        None, "folder with tokenizer.json, where the target's own cannot be used", metavar="DIR",
    )
    host: str = declare(
        "127.0.0.1", "default: 127.0.0.1; 0.0.0.0 listens on every interface",
    )
    port: int = declare(8000, "default: 8000; 0 takes a free one", maximum=2**16 - 1)
    metrics_port: int | None = declare(
        None,
        "another port of the same host for /metrics, /health and /ready, which need no key there;"
        " the other one has no /metrics then (0 takes a free one)",
        maximum=2**16 - 1, metavar="PORT", rare=True,
    )
    name: str | None = declare(None, "the first model's name; its target's by default")
    model: Texts = declare(
        (), "another pair to serve; requests choose models by name (repeatable)",
        metavar="NAME=TARGET[,DRAFTER]",
    )
    alias: Texts = declare(
        (), "another name for a served model, such as claude-sonnet=tiny (repeatable)",
        metavar="NAME=MODEL",
    )
    serve_any_name: bool = declare(
        False,
        "answer requests for models of any other name, too; responses repeat that name",
        rare=True,
    )
    queue: int = declare(64, "most outputs that wait or run (default 64)", minimum=1, rare=True)
    timeout: float = declare(
        600.0, "seconds per request (default 600; 0: no limit)",
        minimum=-1e9, maximum=1e9, rare=True,
    )
    drain: float = declare(
        30.0, "seconds for running requests after SIGTERM (default 30)", maximum=1e9, rare=True,
    )
    max_body: int | None = declare(
        None,
        "limit of request bodies (default: 64 bytes per token of the longest context, at least"
        " 4 and at most 32 MiB)",
        minimum=1, metavar="BYTES", rare=True,
    )
    max_bodies: int | None = declare(
        None,
        "limit of all request bodies together that are held at a time (default: 256 MiB, or four"
        " times --max-body if that is more)",
        minimum=1, metavar="BYTES", rare=True,
    )
    hosts: int = declare(
        1,
        "one model over N processes, whose devices --mesh splits it over (by default kv heads, and"
        " rows over the rest): on this machine, on a cluster by --ray, or by hand with --host-index"
        " and --coordinator on several",
        minimum=1, metavar="N", rare=True,
    )
    host_index: int | None = declare(
        None,
        "which of the --hosts this process is: 0 answers HTTP, and the others follow it",
        minimum=0, metavar="I", rare=True,
    )
    coordinator: str | None = declare(
        None,
        "address of host 0, at which it listens for the other hosts without asking for a proof:"
        " one of a private network",
        metavar="HOST:PORT", rare=True,
    )
    ray: str | None = declare(
        None,
        "place the --hosts on a Ray cluster, one per node if there are enough: HOST:PORT, auto, or"
        " local to start one",
        metavar="ADDRESS", rare=True,
    )
    max_tokens: int = declare(
        0, "of requests without max_tokens (0: all that fits; 16 for completions)",
        maximum=MAX_INT, rare=True,
    )
    temperature: float = declare(
        0.0, "of requests without temperature (0: greedy)", maximum=MAX_TEMPERATURE, rare=True,
    )
    recovery: Literal["off", "tools", "all"] = declare(
        "tools",
        "requests that use dj.Recovery() unless they set recovery themselves: none, those with"
        " tools, or all; DFLASH_MIN_TOKENS and DFLASH_STALL_TOOL_PREFIX set its floor and"
        " tool_prefix",
        rare=True,
    )
    api_key_file: str | None = declare(
        None,
        "file with an API key a line, as KEY or as NAME: KEY rpm=60 tpm=90000 parallel=4, and"
        " comments after #; SIGHUP has it read again. Or set DFLASH_API_KEY to such keys separated"
        " by commas",
    )
    share_prefixes: bool = declare(
        False,
        "let requests of all API keys use one prefix cache; by default each key has its own, since"
        " the number of cached tokens tells what others have sent",
        rare=True,
    )
    allowed_host: Texts = declare(
        (),
        "additional name to accept in Host headers (repeatable). Loopback names and --host are"
        " always accepted; *.NAME accepts all subdomains, and * every name, which is the default"
        " with an API key",
        metavar="NAME", rare=True,
    )
    cors_origin: Texts = declare(
        (), "origin whose web pages may use the server, * for any (repeatable)",
        metavar="ORIGIN", flags=("--cors",), rare=True,
    )
    metrics: bool = declare(False, "add statistics to every response", rare=True)
    no_ui: bool = declare(False, "serve no web page at /")
    quiet: bool = declare(False, "no log line for requests that went well", rare=True)
    log_format: Literal["text", "json"] = declare(
        "text", "how to write log lines, of which each request has one (default: text)",
        rare=True,
    )
    warm: Literal["none", "common", "all"] = declare(
        "common",
        "programs to compile before /ready: none compiles greedy ones, common (default) also"
        " sampled ones, and those for recovery, structured output, penalties and log probabilities"
        " in the background afterwards; all compiles all of them",
        rare=True,
    )
    compile_wait: float = declare(
        50.0,
        "how long a request waits for programs to be compiled before it gets a 503 with"
        " Retry-After (default 50); streams get comments instead",
        maximum=1e9, metavar="SECONDS", rare=True,
    )
    grammar_timeout: float = declare(
        30.0,
        "how long a JSON schema or grammar of a request may take to compile (default 30)"
        " before it gets a 400; other requests are not delayed",
        minimum=1e-3, maximum=1e9, metavar="SECONDS", rare=True,
    )
    record: str | None = declare(
        None,
        "write every turn of the engine, with the prompts of all requests, to a new file that"
        " `dflash-jax replay` runs again; at most 256 MiB",
        metavar="FILE", rare=True,
    )
    # fmt: on

    def _check(self) -> None:
        """Raise RequestError for options that contradict each other."""
        _ = self.models
        _ = self.aliases
        if self.metrics_port and self.metrics_port == self.port:
            raise RequestError(f"--metrics-port is {self.port}, as --port is; give another one")
        one = self.max_body
        together = self.max_bodies
        if one is not None and together is not None and together < one:
            raise RequestError(f"--max-bodies is {together}; expected at least --max-body, {one}")
        self._check_hosts()
        self._check_record()

    @classmethod
    def _label(cls, name: str) -> str:
        return flag(name)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ServeOptions":
        """Return options from values or texts by name; fields of the plan are among them.

        Those of the file that `config` names come after the others.

        Raises:
          RequestError: a name is unknown, or a value is wrong.
          PlanError: fields of the plan contradict each other.
        """
        named = {str(key).replace("-", "_"): value for key, value in values.items()}
        file = named.get("config")
        if isinstance(file, str | Path):
            named = config_options(file) | named
        return cls.parse(named)

    @property
    def time_limit(self) -> float | None:
        """Seconds of a request after which it ends with the tokens so far; None for no limit."""
        return self.timeout if self.timeout > 0 else None

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
        pairs: dict[str, tuple[str, str]] = {}
        for text in self.model:
            name, _, pair = text.partition("=")
            target, _, drafter = pair.partition(",")
            if not name or not target or name in (self.first_name, *pairs):
                raise RequestError(f"--model {text!r}: expected a new NAME=TARGET[,DRAFTER]")
            pairs[name] = target, drafter or "own"
        return pairs

    def check_files(self) -> None:
        """Raise CheckpointError if a model or tokenizer does not exist."""
        for name in ("target", "drafter", "tokenizer", "lora"):
            source = getattr(self, name)
            check_exists(source, "adapter" if name == "lora" else name)
        if self.record is not None:
            _check_new_file("--record", self.record)
        for name, (target, drafter) in self.models.items():
            try:
                check_exists(target, "target")
                check_exists(drafter, "drafter")
            except CheckpointError as error:
                raise CheckpointError(f"model {name}: {error}") from None

    def _check_record(self) -> None:
        """Check the options of a recording."""
        refused = {
            "--model": bool(self.model),
            "--prefix-folder": bool(self.plan.prefix_folder),
            "--hosts": self.hosts > 1,
        }
        for name, is_set in refused.items():
            if is_set and self.record is not None:
                raise RequestError(f"{name} cannot be used with --record; leave one of them out")

    def _check_hosts(self) -> None:
        """Check the options of several hosts."""
        if self.ray is not None and self.hosts < 2:
            raise RequestError(
                f"--hosts is {self.hosts} with --ray; expected a number of processes, at least 2"
            )
        self._check_place()
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
        }
        for name, is_set in refused.items():
            if is_set:
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

    def _check_place(self) -> None:
        """Check which of several hosts this is."""
        index = self.host_index
        if (index is None) != (self.coordinator is None):
            raise RequestError(
                "--host-index and --coordinator go together: which of the --hosts this is, and the"
                " address of host 0; without both, --hosts starts all processes on this machine"
            )
        if index is None or self.coordinator is None:
            return
        if self.ray is not None:
            raise RequestError("--ray places the hosts itself; leave out --host-index")
        if index >= self.hosts:
            raise RequestError(
                f"--host-index is {index} of --hosts {self.hosts}; expected 0 to {self.hosts - 1}"
            )
        try:
            split_address(self.coordinator)
        except ValueError as error:
            raise RequestError(f"--coordinator is {error}") from None


document(
    ServeOptions,
    "\n\nRaises:\n  RequestError: a value is wrong, or options contradict each other.",
)


def _check_new_file(option: str, name: str) -> None:
    """Raise RequestError unless a file of the name can be created."""
    path = Path(name).expanduser()
    if os.path.lexists(path):
        raise RequestError(f"{option}: {path} exists; give the name of a new file, or remove it")
    if not path.parent.is_dir():
        raise RequestError(f"{option}: there is no folder {path.parent}; create it first")


def read_config(path: str | Path) -> dict[str, Any]:
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


def config_options(path: str | Path) -> dict[str, Any]:
    """Return the options in a configuration file, by name; its keys are read by `server.keys`.

    Tables of models and aliases become what their flags take. Without `target`, the first of the
    models is the default one.

    Raises:
      RequestError: it cannot be read, or has a wrong model, alias or table.
    """
    options = read_config(path)
    options.pop("keys", None)
    models = options.get("model")
    if isinstance(models, Mapping):
        pairs = {name: _model(name, entry) for name, entry in models.items()}
        if pairs and "target" not in options:
            first = next(iter(pairs))
            target, drafter = pairs.pop(first)
            options |= {"name": first, "target": target, "drafter": drafter}
        options["model"] = [f"{name}={','.join(pair)}" for name, pair in pairs.items()]
    aliases = options.get("alias")
    if isinstance(aliases, Mapping):
        options["alias"] = [f"{name}={model}" for name, model in aliases.items()]
    for name, value in options.items():
        if isinstance(value, Mapping):
            raise RequestError(
                f"{path} has a table [{name}]; expected [model.NAME], [alias] or [keys], and"
                " options before the first table"
            )
    return options


def _model(name: str, entry: Any) -> tuple[str, str]:
    """Return target and drafter of a table of a configuration file."""
    pair = {"drafter": "own"} | (dict(entry) if isinstance(entry, Mapping) else {"target": entry})
    if problems := unknown_names(pair, ("target", "drafter"), f"field of [model.{name}]"):
        raise RequestError(sentences(problems))
    target = pair.get("target")
    drafter = pair["drafter"]
    if not isinstance(target, str) or not isinstance(drafter, str) or "," in target:
        raise RequestError(
            f"[model.{name}] has target {target!r} and drafter {drafter!r}; expected texts, without"
            " a comma in the target's"
        )
    return target, drafter


def flag(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")
