"""Engines whose models are loaded by workers on several hosts."""

import dataclasses
import math
import threading
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import HostError, PlanError
from dflash_jax.graph.resolve import resolve
from dflash_jax.hosts import messages
from dflash_jax.hosts.group import LOAD_S, START_S, HostGroup
from dflash_jax.hosts.launch import Launcher
from dflash_jax.hosts.remote import RemoteExecutor
from dflash_jax.loading import OpenPair
from dflash_jax.models import build_graph, build_pair
from dflash_jax.plan import Plan
from dflash_jax.tokenizer import Tokenizer


class HostedPair:
    """A target and its drafter, opened here for their configs, and loaded by workers.

    Args:
      pair: the models, opened in this process.
      sources: arguments of `open_pair` for the workers, by name.
      launcher: starts the workers.
      hosts: number of workers.
      devices: virtual devices of a worker on a CPU; 0 leaves them to `XLA_FLAGS`.
    """

    def __init__(
        self,
        pair: OpenPair,
        sources: dict[str, str | None],
        launcher: Launcher,
        *,
        hosts: int,
        devices: int = 0,
    ):
        self._pair, self._launcher = pair, launcher
        self._sources = {name: _absolute(source) for name, source in sources.items()}
        self._hosts, self._devices = hosts, devices
        self._group: HostGroup | None = None
        self._starting = threading.Lock()

    @property
    def configs(self) -> tuple[TargetConfig, DrafterConfig | None]:
        """Configs of the two models."""
        return self._pair.configs

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer."""
        return self._pair.tokenizer

    def engine(self, plan: Plan) -> Engine:
        """Start workers that load the models, and return an engine; ends earlier workers.

        Raises:
          HostError: a worker cannot start, or fails.
          PlanError: the plan does not fit the hosts' devices, their memory or the models.
        """
        with self._starting:
            if self._group is not None:
                self._group.close()
            group = self._group = HostGroup(self._launcher, self._hosts)
            try:
                return self._engine(group, plan)
            except BaseException:
                group.close()
                raise

    def _engine(self, group: HostGroup, plan: Plan) -> Engine:
        join = messages.Join(group.coordinator, self._hosts, self._devices)
        joined: list[messages.HostDevices] = group.ask(join, START_S)
        plan = completed(plan, joined, *self.configs)
        loaded = group.ask(messages.Load(self._sources, plan.to_json()), LOAD_S)
        if len({reply.digest for reply in loaded}) > 1:
            raise HostError(
                f"hosts have different models under {self._sources['target']!r} and"
                f" {self._sources['drafter']!r}; copy the same files to each host"
            )
        graph = build_graph(*self.configs, plan)
        executor = RemoteExecutor(group, graph, loaded[0])
        return Engine(graph, executor.params, tokenizer=self.tokenizer, executor=executor)


def completed(
    plan: Plan,
    joined: Sequence[messages.HostDevices],
    target: TargetConfig,
    drafter: DrafterConfig | None,
) -> Plan:
    """Return the plan with every choice made, for a mesh over all devices of the hosts.

    Raises:
      HostError: hosts have different platforms or numbers of devices.
      PlanError: the mesh has another number of devices, or the plan does not fit.
    """
    platforms = {(reply.platform, reply.devices) for reply in joined}
    if len(platforms) > 1:
        named = "; ".join(f"host {i} has {x.devices} of {x.platform}" for i, x in enumerate(joined))
        raise HostError(f"hosts have different devices ({named}); give each host the same")
    [(platform, each)] = platforms
    total = each * len(joined)
    if plan.mesh == (1, 1):
        plan = dataclasses.replace(plan, mesh=_default_mesh(plan.rows, total, target.num_kv_heads))
    data, model = plan.mesh
    if data * model != total:
        raise PlanError(
            f"mesh is {data} x {model}, but {len(joined)} hosts have {total} devices, {each} each;"
            f" leave it out, or give one of {total}, such as 1x{total}"
        )
    memory = min(reply.memory for reply in joined)
    memory *= len(joined) if platform == "cpu" else total
    return resolve(plan, build_pair(target, drafter), platform=platform, memory=memory)


def _default_mesh(rows: int, devices: int, kv_heads: int) -> tuple[int, int]:
    """Return a mesh that splits kv heads, and rows over the other devices if it divides them.

    Where the devices do not divide the kv heads, every device would hold and exchange all caches.
    """
    model = math.gcd(devices, kv_heads)
    return (devices // model, model) if rows % (devices // model) == 0 else (1, devices)


def _absolute(source: str | None) -> str | None:
    """Return the absolute path of a source that is one; names and hub ids as they are."""
    path = Path(source or "").expanduser()
    return str(path.absolute()) if source and path.exists() else source
