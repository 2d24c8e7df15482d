"""Adapters for Ray: replicas of the server, and answers of large data sets. Need the extra `ray`.

`serve run dflash_jax.ray:app` calls `app`. A request passes `gateway`, whose handle chooses a
replica by `router`, and reaches the server of a `replica`; `serving` puts the three together.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import RequestError, install_hint


def app(args: Mapping[str, Any]) -> Any:
    """Return the application that `serve run` and the YAML file of `serve deploy` name.

    Args:
      args: options of `dflash-jax serve` by name, such as `target` and `rows`, and those of
        `serving.SCALING`. The environment variable DFLASH_SERVE_ROWS gives the default of `rows`.

    Raises:
      RequestError: the extra `ray` is missing, or an option is unknown or wrong.
      PlanError: the options of the plan contradict each other.
    """
    check_installed()
    from dflash_jax.ray import serving

    return serving.application(args)


def check_installed() -> None:
    """Raise RequestError if the extra `ray` is not installed."""
    try:
        import ray.data
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise RequestError(f"this needs Ray ({error}); {install_hint('ray')}") from error
