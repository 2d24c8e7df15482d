"""Adapters for Ray: replicas of the server, and answers of large data sets. Need the extra `ray`.

`serve run dflash_jax.ray:app` calls `app`. In `serving`, a gateway passes requests to replicas,
chosen by conversation (`calls`). `answers` is in `offline`. Hosts
that train (`commands`) are placed by `hosts`.
"""

import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_jax.errors import RequestError, install_hint
from dflash_jax.serve_options import ServeOptions

if TYPE_CHECKING:
    from dflash_jax.trainer.recipes import Recipe
    from dflash_jax.trainer.regenerate import Decoder

CONNECT_S = 10.0  # seconds
PREFIX = "DFLASH_SERVE_"  # of environment variables
# Options of the application itself, with their defaults: number of replicas, or least and most as
# "1-4"; GPUs and CPUs that Ray reserves for each.
SCALING = {"replicas": "1", "gpus": "0", "cpus": "1"}


def app(args: Mapping[str, Any]) -> Any:
    """Return the application that `serve run` and the YAML file of `serve deploy` name.

    Args:
      args: options of `dflash-jax serve` by name, such as `target` and `rows`, and those of
        `SCALING`. The environment variable DFLASH_SERVE_ROWS gives the default of `rows`.

    Raises:
      RequestError: the extra `ray` is missing, or an option is unknown or wrong.
      PlanError: the options of the plan contradict each other.
    """
    check_installed()
    from dflash_jax.ray import serving

    return serving.application(args)


def given_options(
    args: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ServeOptions, dict[str, str]]:
    """Return the options of `dflash-jax serve`, and those of `SCALING`.

    Args:
      args: options by name; they take precedence over those of `environ`.

    Raises:
      RequestError: a name is unknown, or a value is wrong.
    """
    values: dict[str, Any] = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX)
    }
    values |= {name.replace("-", "_"): value for name, value in args.items()}
    scaling = {name: str(values.pop(name, default)) for name, default in SCALING.items()}
    try:
        options = ServeOptions.of(values)
    except RequestError as error:
        raise RequestError(f"{error}; further options are {', '.join(SCALING)}") from None
    for name in ("record", "host_index", "ray"):
        if getattr(options, name) is not None:
            raise RequestError(f"{name} is an option of a single server; leave it out of replicas")
    return options, scaling


def scaling_options(scaling: Mapping[str, str], rows: int) -> dict[str, Any]:
    """Return options of a deployment for the options of `SCALING`.

    Args:
      rows: requests that a replica decodes at a time, the target of autoscaling.

    Raises:
      RequestError: a value is wrong.
    """
    resources = {f"num_{name}": _number(name, scaling[name]) for name in ("cpus", "gpus")}
    options: dict[str, Any] = {"ray_actor_options": resources}
    least, dash, most = scaling["replicas"].partition("-")
    if not dash:
        return options | {"num_replicas": int(_number("replicas", least, least=1, whole=True))}
    limits: dict[str, Any] = {
        "min_replicas": int(_number("replicas", least, whole=True)),
        "max_replicas": int(_number("replicas", most, least=1, whole=True)),
        "target_ongoing_requests": rows,
    }
    if limits["min_replicas"] > limits["max_replicas"]:
        raise RequestError(
            f"replicas is {scaling['replicas']!r}; expected a number, or least and most as 1-4"
        )
    return options | {"autoscaling_config": limits}


def _number(name: str, text: str, *, least: float = 0, whole: bool = False) -> float:
    try:
        value = float(text)
        if value < least or (whole and not value.is_integer()):
            raise ValueError
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} is {text!r}; expected {kind} of at least {least:g}") from None
    return value


def answers(
    dataset: Any,
    out: str | Path,
    recipe: "Recipe",
    *,
    target: str = "tiny",
    workers: int | None = None,
    mask_id: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Any:
    """Return a `ray.data.Dataset` of prompts and the target's answers, decoded by Ray's actors.

    The folder is that of a training run: the same call resumes after a stop, and
    `dflash-jax train --out` with the same settings continues with the answers. Rows whose hash
    holds them out are not answered. Greedy answers are those of a local run.

    Args:
      dataset: a dataset with rows like the lines of `--data`, or a source that `--data` takes.
      out: the run's folder.
      recipe: as `dflash_jax.trainer.recipes.recipe` returns it.
      target: path, hub id or name of the target, known on every machine.
      workers: number of actors; by default one per GPU, or one per machine if there are none.
      mask_id: the drafter's mask token, if it cannot be detected.
      report: called with progress lines.

    Returns:
      Rows with the token `ids` of prompt and answer, `wanted` for those of the answer, and `text`.

    Raises:
      RequestError: the extra `ray` is missing.
      ConfigError, CheckpointError, TrainingStopped: as for `dflash_jax.trainer.run.run`.
    """
    check_installed()
    from dflash_jax.ray import offline

    return offline.answers(
        dataset, Path(out), recipe, target=target, workers=workers, mask_id=mask_id, report=report
    )


def decoder(address: str, target: str, recipe: "Recipe") -> "Decoder":
    """Connect to a cluster, and return how `dflash_jax.trainer.run.finish` decodes answers there.

    Args:
      address: HOST:PORT, "auto", or "local" to start a cluster on this machine.

    Raises:
      RequestError: the extra `ray` is missing, or no cluster answers.
    """
    _connect(address)
    from dflash_jax.ray import offline

    return offline.ray_decoder(target, recipe, None)


def serve_one_model(options: ServeOptions, listening: Callable[[str], object]) -> None:
    """Serve one model over several hosts of a cluster until a signal arrives.

    Args:
      listening: called with the URL once the model is served.

    Raises:
      RequestError: the extra `ray` is missing, or no cluster answers.
    """
    assert options.ray is not None
    _connect(options.ray)
    from dflash_jax.ray import serving

    serving.serve_one_model(options, listening)


def train(
    address: str, words: Sequence[str], *, hosts: int, devices: int, show: Callable[[str, str], Any]
) -> int:
    """Run `dflash-jax train` by processes that a cluster places, and return the exit code.

    The cluster's other workers answer the prompts before the hosts start.

    Args:
      address: as for `decoder`.
      words: the command, without `--hosts` and `--ray`; paths must hold on all nodes.
      hosts: number of processes.
      devices: of each.
      show: called with "stdout" or "stderr" and each line that the command prints.

    Raises:
      RequestError: the extra `ray` is missing, or no cluster answers.
      HostError: the cluster has no room.
    """
    _connect(address)
    import ray

    from dflash_jax.ray import commands
    from dflash_jax.ray import hosts as placed

    running = ray.get_runtime_context().gcs_address
    if code := commands.run_here([*words, "--ray", running, "--only-answers"], show):
        return code
    return placed.train([*words, "--hosts", str(hosts)], hosts, devices, show)


def _connect(address: str) -> None:
    check_installed()
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    host, colon, port = address.rpartition(":")
    try:
        if colon and "/" not in host:  # Ray itself waits for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        ray.init(address=address)
    except (OSError, OverflowError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(
            f"--ray {address}: no cluster answers ({reason}); expected HOST:PORT of one that runs,"
            " auto, or local to start one"
        ) from error
    # Ray's own handlers end the process at once, or abort it after 3 seconds.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def check_installed() -> None:
    """Raise RequestError if the extra `ray` is not installed."""
    try:
        import ray.data
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise RequestError(f"this needs Ray ({error}); {install_hint('ray')}") from error
