"""Training on several hosts of a cluster: an actor per host, each with a process that trains.

Each process runs the command of a host that is started by hand. The command that was given follows
them: it shows what host 0 prints, passes signals on, and starts all again if one is lost.
"""

import contextlib
import secrets
import signal
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dflash_jax.errors import HostError
from dflash_jax.hosts.launch import TOKEN
from dflash_jax.ray.commands import CommandProcess, Line, Show, follow
from dflash_jax.ray.host_actors import Placed, gpus_per_node
from dflash_jax.trainer.loop import stop_flag
from dflash_jax.trainer.training_hosts import free_ports

ANSWER = 30.0  # seconds in which an actor answers
RESTARTS = 3  # of all hosts, if one is lost


class TrainingActor:
    """Runs the command of one host on its node."""

    _process: CommandProcess

    def address(self) -> tuple[str, int]:
        """Return an address of this node at which host 0 can listen."""
        return free_ports(ray.util.get_node_ip_address())

    def start(self, words: Sequence[str], token: str) -> None:
        """Start the command, with the token of all hosts."""
        self._process = CommandProcess(words, **{TOKEN: token})

    def poll(self) -> tuple[list[Line], int | None]:
        """See `Command`."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """See `Command`."""
        self._process.signal(number)

    def kill(self) -> None:
        """See `Command`."""
        self._process.kill()


class RemoteCommand:
    """The command of an actor; its exit code is -SIGKILL if the actor is lost."""

    def __init__(self, actor: Any):
        self._actor = actor

    def poll(self) -> tuple[list[Line], int | None]:
        """See `Command`."""
        try:
            return ray.get(self._actor.poll.remote(), timeout=ANSWER)
        except RayError:
            return [], -signal.SIGKILL

    def signal(self, number: int) -> None:
        """See `Command`."""
        self._actor.signal.remote(number)

    def kill(self) -> None:
        """See `Command`."""
        with contextlib.suppress(RayError):
            ray.get(self._actor.kill.remote(), timeout=ANSWER)


def train(words: Sequence[str], hosts: int, devices: int, show: Show) -> int:
    """Train by hosts on the cluster, and return the exit code.

    Args:
      words: the command, without `--host` and `--coordinator`.
      hosts: number of hosts.
      devices: of each; they are GPUs if all nodes have some.
      show: called with the lines of the hosts.

    Raises:
      HostError: the cluster has no room, or fails before the hosts start.
    """
    gpus = devices if gpus_per_node() else 0
    with stop_flag() as stop:
        for left in reversed(range(RESTARTS + 1)):
            with Placed(hosts, gpus=gpus) as placed:
                codes = follow(started(placed, words, hosts), show, stop)
            lost = ", ".join(str(host) for host, code in enumerate(codes) if code < 0)
            if stop.raised or not lost or not left:
                break
            show("stderr", f"host {lost} was lost; all hosts start again from the last saved state")
    return next((max(code, 1) for code in codes if code), 0)


def started(placed: Placed, words: Sequence[str], hosts: int) -> list[RemoteCommand]:
    """Start the command of each host in its place."""
    actors = [placed.actor(TrainingActor, host) for host in range(hosts)]
    try:
        name, port = ray.get(actors[0].address.remote())
    except RayError as error:
        raise HostError(
            f"the cluster cannot start host 0 ({type(error).__name__}); look at its nodes with"
            " `ray status`, and run the same command again"
        ) from error
    where = ["--coordinator", f"[{name}]:{port}" if ":" in name else f"{name}:{port}"]
    token = secrets.token_hex(32)
    for host, actor in enumerate(actors):
        actor.start.remote([*words, *where, "--host", str(host)], token)
    return [RemoteCommand(actor) for actor in actors]
