"""Processes of several hosts, placed on a cluster: an actor per host starts and watches one.

Workers of one model serve. A host that trains runs the command of a host that is started by hand;
the command that was given follows all of them: it shows what host 0 prints, passes signals on, and
starts all again if one is lost.
"""

import secrets
import signal
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash_jax.errors import HostError
from dflash_jax.hosts.channel import joined_address
from dflash_jax.hosts.launch import TOKEN, ChildProcess
from dflash_jax.ray.commands import CommandProcess, Line, Show, follow
from dflash_jax.trainer.loop import stop_flag
from dflash_jax.trainer.training_hosts import free_ports

PLACE_S = 120.0  # seconds in which the cluster has to have room
KILL_S = 5.0  # seconds in which an actor has to kill its worker, before it is killed itself
ANSWER_S = 30.0  # seconds in which an actor answers
RESTARTS = 3  # of all hosts that train, if one is lost


class HostActor:
    """Starts and watches the process of one host on its node."""

    _process: ChildProcess | CommandProcess

    def address(self) -> tuple[str, int]:
        """Return an address of this node at which host 0 can listen."""
        return free_ports(ray.util.get_node_ip_address())

    def start_worker(self, front: str, index: int, token: str) -> None:
        """Start a worker; arguments as for `ChildProcess`."""
        self._process = ChildProcess(index, front, token, ray.util.get_node_ip_address())

    def start_command(self, words: Sequence[str], token: str) -> None:
        """Start a command, with the token of all hosts."""
        self._process = CommandProcess(words, **{TOKEN: token})

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the process returns."""
        return getattr(self._process, method)(*arguments)


class RemoteProcess:
    """The process of an actor, as a worker that serves and as a command."""

    name = "a Ray actor"  # in error messages

    def __init__(self, actor: Any):
        self._actor, self._asked = actor, None

    def status(self) -> str | None:
        """Return how a worker ended, by the last answer of the actor; never waits."""
        self._asked = self._asked or self._actor.call.remote("status")
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        try:
            status = ray.get(self._asked)
        except RayError as error:
            return f"ended with its actor ({type(error).__name__})"
        if status is None:
            self._asked = self._actor.call.remote("status")
        return status

    def poll(self) -> tuple[list[Line], int | None]:
        """See `Command`; the exit code is -SIGKILL if the actor is lost."""
        try:
            return ray.get(self._actor.call.remote("poll"), timeout=ANSWER_S)
        except RayError:
            return [], -signal.SIGKILL

    def signal(self, number: int) -> None:
        """See `Command`."""
        self._actor.call.remote("signal", number)

    def kill(self) -> None:
        """Kill the process and its actor."""
        ray.wait([self._actor.call.remote("kill")], timeout=KILL_S)
        ray.kill(self._actor)


class Placed:
    """CPUs and GPUs of a cluster, reserved for an actor per host, on as many nodes as there are.

    Args:
      gpus: of each host.

    Raises:
      HostError: the cluster has no room.
    """

    def __init__(self, hosts: int, *, gpus: int):
        bundle = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
        self._gpus = gpus
        self._group = placement_group([bundle] * hosts, strategy="SPREAD")
        try:
            ray.get(self._group.ready(), timeout=PLACE_S)
        except GetTimeoutError:
            self.close()
            raise HostError(
                f"the cluster had no room for {hosts} workers with {bundle} each within"
                f" {PLACE_S:g} s; add nodes, or give fewer --hosts"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def actor(self, host: int) -> Any:
        """Start the actor of a host in its place."""
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host)
        options = {"num_cpus": 1, "num_gpus": self._gpus, "scheduling_strategy": where}
        return ray.remote(HostActor).options(**options).remote()

    def close(self) -> None:
        """Free what is reserved, which ends the actors."""
        remove_placement_group(self._group)


class RayLauncher:
    """Starts workers on a cluster.

    Attributes:
      address: of this node, on which the server listens for its workers.
    """

    def __init__(self, hosts: int):
        self.address: str = ray.util.get_node_ip_address()
        self._hosts = hosts
        self._placed: Placed | None = None

    def start(self, index: int, front: str, token: str) -> RemoteProcess:
        """Start a worker.

        Raises:
          HostError: the cluster has no room.
        """
        self._placed = self._placed or Placed(self._hosts, gpus=gpus_per_node())
        actor = self._placed.actor(index)
        actor.start_worker.remote(front, index, token)
        return RemoteProcess(actor)

    def close(self) -> None:
        """Free the reserved resources."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.close()


def gpus_per_node() -> int:
    """Return the number of GPUs that every node has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return min((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)


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


def started(placed: Placed, words: Sequence[str], hosts: int) -> list[RemoteProcess]:
    """Start the command of each host in its place."""
    actors = [placed.actor(host) for host in range(hosts)]
    try:
        name, port = ray.get(actors[0].address.remote())
    except RayError as error:
        raise HostError(
            f"the cluster cannot start host 0 ({type(error).__name__}); look at its nodes with"
            " `ray status`, and run the same command again"
        ) from error
    where = ["--coordinator", joined_address(name, port)]
    token = secrets.token_hex(32)
    for host, actor in enumerate(actors):
        actor.start_command.remote([*words, *where, "--host", str(host)], token)
    return [RemoteProcess(actor) for actor in actors]
