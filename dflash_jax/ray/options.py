"""Options of the application: those of `dflash-jax serve`, and how replicas are made. No Ray."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.serve_options import ServeOptions

PREFIX = "DFLASH_SERVE_"  # of environment variables
# Options of the application itself, with their defaults: number of replicas, or least and most as
# "1-4"; GPUs and CPUs that Ray reserves for each.
SCALING = {"replicas": "1", "gpus": "0", "cpus": "1"}


def given_options(
    args: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ServeOptions, dict[str, str]]:
    """Return the options of `dflash-jax serve`, and those of `SCALING`.

    Args:
      args: options by name; they take precedence over those of `environ`.

    Raises:
      RequestError: a name is unknown, or a value is wrong.
    """
    given: dict[str, Any] = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX)
    }
    given |= {name.replace("-", "_"): value for name, value in args.items()}
    scaling = {name: str(given.pop(name, default)) for name, default in SCALING.items()}
    try:
        return ServeOptions.of(given), scaling
    except RequestError as error:
        raise RequestError(f"{error}; further options are {', '.join(SCALING)}") from None


def scaling_options(given: Mapping[str, str], rows: int) -> dict[str, Any]:
    """Return options of a deployment for the options of `SCALING`.

    Args:
      rows: requests that a replica decodes at a time, the target of autoscaling.

    Raises:
      RequestError: a value is wrong.
    """
    resources = {f"num_{name}": _number(name, given[name]) for name in ("cpus", "gpus")}
    options: dict[str, Any] = {"ray_actor_options": resources}
    least, dash, most = given["replicas"].partition("-")
    if not dash:
        return options | {"num_replicas": int(_number("replicas", least, least=1, whole=True))}
    scaling = {
        "min_replicas": int(_number("replicas", least, whole=True)),
        "max_replicas": int(_number("replicas", most, least=1, whole=True)),
        "target_ongoing_requests": rows,
    }
    if scaling["min_replicas"] > scaling["max_replicas"]:
        raise RequestError(
            f"replicas is {given['replicas']!r}; expected a number, or least and most as 1-4"
        )
    return options | {"autoscaling_config": scaling}


def _number(name: str, text: str, *, least: float = 0, whole: bool = False) -> float:
    try:
        value = float(text)
        if value < least or (whole and not value.is_integer()):
            raise ValueError
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} is {text!r}; expected {kind} of at least {least:g}") from None
    return value
