"""Hosts that serve one model: process 0 answers HTTP, and the others follow its engine's turns.

All load the model on one mesh of their devices, see `engine/turns/group_turns.py`. They end
together: the launcher starts all again, which is Ray's work, that of a cluster's scheduler, or a
person's.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from dflash_jax import distributed
from dflash_jax.device import default_device, free_memory
from dflash_jax.distributed import Group, HostPlace
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.turns.group_turns import follow_turns
from dflash_jax.engine.turns.recording import about
from dflash_jax.errors import HostError, PlanError
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.steps.pair import Pair
from dflash_jax.plan import Plan, ResolvedPlan
from dflash_jax.serve_options import ServeOptions
from dflash_jax.utils.addresses import free_address
from dflash_jax.utils.child_processes import on_this_machine

ADVICE = "start all hosts again"
COMPARED = ("target", "drafter", "layer_ids", "lora", "tokenizer")  # options


def run(options: ServeOptions, serve: Callable[[], int], *, local: bool = False) -> NoReturn:
    """Take part in serving one model; ends this process, and all others with it.

    Args:
      serve: answers HTTP, in process 0, and returns an exit code.
      local: whether process 0, of this machine, started this one.

    Raises:
      HostError: this process cannot listen at the coordinator's address.
    """
    with contextlib.ExitStack() as entered:
        entered.enter_context(_native_output_on_stderr())
        if options.coordinator is None:
            local = True
            options = dataclasses.replace(options, host_index=0, coordinator=free_address())
            others = on_this_machine(lambda i: _words(options, i), options.hosts)
            entered.enter_context(others)
        group = join(options, local=local)
        take_part(group, serve if group.first else lambda: follow(options, group))


def join(options: ServeOptions, *, local: bool = False) -> Group:
    """Join the other hosts; arguments and errors as for `run`."""
    assert options.coordinator is not None
    data, model = options.plan.mesh
    place = HostPlace(
        options.host_index or 0,
        options.hosts,
        options.coordinator,
        devices=data * model // options.hosts if data * model > 1 else 0,
        local=local,
    )
    common = {name: getattr(options, name) for name in COMPARED}
    return distributed.join(place, common, advice=ADVICE)


def take_part(group: Group, work: Callable[[], int]) -> NoReturn:
    """Do the work of this process, and end the group with it."""
    try:
        code = work()
    except BaseException as error:
        group.leave_by(error)
    group.leave("", code)


def _words(options: ServeOptions, index: int) -> Sequence[str]:
    """Return the module that process `index` on this machine runs, and its argument."""
    values = dataclasses.replace(options, host_index=index).to_json()
    plan = values.pop("plan")  # which has fields that options replace
    return "dflash_jax.server.serving_hosts", json.dumps(plan | values)


@contextlib.contextmanager
def _native_output_on_stderr() -> Iterator[None]:
    """Let native code write to standard error, on which the CPU's collectives log connections.

    What Python prints stays on standard output.
    """
    sys.stdout.flush()
    before = sys.stdout
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding=before.encoding, closefd=False) as stream:
            sys.stdout = stream
            yield
    finally:
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)


def follow(options: ServeOptions, group: Group) -> int:
    """Load the model of process 0, and follow its turns until they end; return an exit code."""
    from dflash_jax.graph import cache
    from dflash_jax.server.configuration import opened, planned

    with contextlib.suppress(ValueError):  # in another thread than the first
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that it counts while nothing runs, too
        # A service manager tells all processes at once to end: process 0 drains, and ends all.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cache.use_compilation_cache()
    pair = opened(options)
    follow_turns(load(pair, planned(options, pair), group), group)
    return 0


def load(pair: Any, plan: Plan, group: Group) -> Engine:
    """Return the engine of this process, on a mesh over the devices of all.

    Args:
      pair: the opened models.

    Raises:
      HostError: processes have different devices, plans or models.
      PlanError: the plan does not fit the devices, their memory or the models.
    """
    device = default_device()
    own = HostDevices(device.platform, jax.local_device_count(), free_memory(device))
    everywhere = [HostDevices(**x) for x in group.exchange("devices", dataclasses.asdict(own))]
    engine = pair.engine(completed(plan, everywhere, pair.pair))
    for name, value in about(engine).items():
        group.agree(name, value)
    return engine


@dataclasses.dataclass(frozen=True)
class HostDevices:
    """Devices of a process, and the free memory of the first of them."""

    platform: str
    devices: int
    memory: int


def completed(plan: Plan, hosts: Sequence[HostDevices], pair: Pair) -> ResolvedPlan:
    """Return the plan with every choice made, for a mesh over all devices of the hosts.

    Raises:
      HostError: hosts have different platforms or numbers of devices.
      PlanError: the mesh has another number of devices, or the plan does not fit.
    """
    if len({(host.platform, host.devices) for host in hosts}) > 1:
        named = "; ".join(f"host {i} has {x.devices} of {x.platform}" for i, x in enumerate(hosts))
        raise HostError(f"hosts have different devices ({named}); give each host the same")
    first = hosts[0]
    total = first.devices * len(hosts)
    if plan.mesh == (1, 1):
        mesh = _default_mesh(plan.rows, total, pair.target.config.num_kv_heads)
        plan = dataclasses.replace(plan, mesh=mesh)
    data, model = plan.mesh
    if data * model != total:
        raise PlanError(
            f"mesh is {data} x {model}, but {len(hosts)} hosts have {total} devices,"
            f" {first.devices} each; leave it out, or give one of {total}, such as 1x{total}"
        )
    memory = min(host.memory for host in hosts)
    memory *= len(hosts) if first.platform == "cpu" else total
    return resolve(plan, pair, platform=first.platform, memory=memory)


def _default_mesh(rows: int, devices: int, kv_heads: int) -> tuple[int, int]:
    """Return a mesh that splits kv heads, and rows over the other devices if it divides them.

    Where the devices do not divide the kv heads, every device would hold and exchange all caches.
    """
    model = math.gcd(devices, kv_heads)
    return (devices // model, model) if rows % (devices // model) == 0 else (1, devices)


def main() -> NoReturn:
    """Follow process 0, which started this process with its options."""
    options = ServeOptions.parse(json.loads(sys.argv[1]))
    run(options, lambda: 1, local=True)


if __name__ == "__main__":
    main()
