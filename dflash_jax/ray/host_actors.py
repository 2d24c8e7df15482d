"""Workers of one model over several hosts, placed on a cluster: an actor per worker."""

from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash_jax.errors import HostError
from dflash_jax.hosts.launch import ChildProcess

PLACE_S = 120.0  # seconds in which the cluster has to have room
ANSWER_S = 5.0  # seconds in which an actor has to kill its worker, before it is killed itself


class HostActor:
    """Starts and watches a worker on its node; the worker is a process of its own.

    Args:
      front: HOST:PORT of the server.
      index: of the worker.
      token: by which server and worker know each other.
    """

    def __init__(self, front: str, index: int, token: str):
        address = ray.util.get_node_ip_address()
        self._process = ChildProcess(index, front, token, address)

    def status(self) -> str | None:
        """Return how the worker ended; None while it runs."""
        return self._process.status()

    def kill(self) -> None:
        """Kill the worker, and wait for its end."""
        self._process.kill()


class RayProcess:
    """A worker on the cluster, as its server sees it."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._asked: Any = actor.status.remote()

    @property
    def name(self) -> str:
        """What error messages call the worker."""
        return "a Ray actor"

    def status(self) -> str | None:
        """Return the status by the last answer of the actor; never waits."""
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        try:
            status = ray.get(self._asked)
        except RayError as error:
            return f"ended with its actor ({type(error).__name__})"
        if status is None:
            self._asked = self._actor.status.remote()
        return status

    def kill(self) -> None:
        """Kill the worker and its actor."""
        ray.wait([self._actor.kill.remote()], timeout=ANSWER_S)
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

    def actor(self, kind: type, host: int, *arguments: Any) -> Any:
        """Start an actor of a class in the place of a host."""
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host)
        options = {"num_cpus": 1, "num_gpus": self._gpus, "scheduling_strategy": where}
        return ray.remote(kind).options(**options).remote(*arguments)

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

    def start(self, index: int, front: str, token: str) -> RayProcess:
        """Start a worker.

        Raises:
          HostError: the cluster has no room.
        """
        self._placed = self._placed or Placed(self._hosts, gpus=gpus_per_node())
        return RayProcess(self._placed.actor(HostActor, index, front, index, token))

    def close(self) -> None:
        """Free the reserved resources."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.close()


def gpus_per_node() -> int:
    """Return the number of GPUs that every node has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return min((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
