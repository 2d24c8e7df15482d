"""Processes of several hosts, placed on a cluster: an actor per host starts and watches one.

Each runs the command of a host that is started by hand. The command that was given follows all of
them: it shows what host 0 prints, passes signals on, and starts all again if one is lost.
"""

import signal
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash_jax.errors import HostError
from dflash_jax.ray.commands import CommandProcess, Line, Show, follow
from dflash_jax.trainer.loop import stop_flag
from dflash_jax.utils.addresses import free_address

PLACE_S = 120.0  # seconds in which the cluster has to have room
KILL_S = 5.0  # seconds in which an actor has to kill its worker, before it is killed itself
ANSWER_S = 30.0  # seconds in which an actor answers
RESTARTS = 3  # of all hosts that train, if one is lost


class HostActor:
    """Starts and watches the process of one host on its node."""

    _process: CommandProcess

    def address(self) -> str:
        """Return an address of this node at which host 0 can listen."""
        return free_address(ray.util.get_node_ip_address())

    def start_command(self, words: Sequence[str]) -> None:
        """Start a command."""
        self._process = CommandProcess(words)

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the process returns."""
        return getattr(self._process, method)(*arguments)


class RemoteProcess:
    """The command of an actor."""

    def __init__(self, actor: Any):
        self._actor = actor

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
                f"the cluster had no room for {hosts} hosts with {bundle} each within"
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
        address = ray.get(actors[0].address.remote())
    except RayError as error:
        raise HostError(
            f"the cluster cannot start host 0 ({type(error).__name__}); look at its nodes with"
            " `ray status`, and run the same command again"
        ) from error
    where = ["--coordinator", address]
    for host, actor in enumerate(actors):
        actor.start_command.remote([*words, *where, "--host", str(host)])
    return [RemoteProcess(actor) for actor in actors]
