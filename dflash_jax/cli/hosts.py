"""Options of `dflash-jax serve` for one model over several hosts."""

import argparse
from typing import Any

from dflash_jax.cli.options import chosen_drafter, chosen_plan, open_pair
from dflash_jax.errors import RequestError
from dflash_jax.plan import Plan


def add_host_options(server: Any) -> None:
    """Add `--hosts` and `--ray`."""
    server.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="one model over N worker processes, whose devices --mesh splits it over (by default"
        " kv heads, and rows over the rest); without --ray all of them on this machine",
    )
    server.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="place the workers of --hosts on a Ray cluster, one per node if there are enough:"
        " HOST:PORT, auto, or local to start one",
    )


def check_hosts(options: argparse.Namespace) -> None:
    """Check the options of several hosts before JAX is imported or a process started.

    Raises:
      RequestError: a value is wrong, an option cannot work over several hosts, or the extra `ray`
        is missing.
    """
    if options.hosts < 1 or (options.ray is not None and options.hosts < 2):
        more = " with --ray" * (options.ray is not None)
        raise RequestError(
            f"--hosts is {options.hosts}{more}; expected a number of processes, at least"
            f" {2 if more else 1}"
        )
    if options.hosts == 1:
        return
    plan = chosen_plan(options)
    for flag, given in _refused(options, plan).items():
        if given:
            raise RequestError(
                f"{flag} cannot be used with --hosts {options.hosts}; leave it out, or serve the"
                " model from one process"
            )
    data, model = plan.mesh
    if data * model > 1 and data * model % options.hosts:
        raise RequestError(
            f"--mesh {data}x{model} has {data * model} devices, which {options.hosts} hosts cannot"
            f" share equally; give a multiple of {options.hosts}, or leave it out"
        )
    if options.ray is not None:
        from dflash_jax import ray

        ray.check_installed()


def _refused(options: argparse.Namespace, plan: Plan) -> dict[str, bool]:
    """Return the options that cannot work over several hosts, and whether each was given."""
    return {
        "--model": bool(options.model),
        "--prefix-folder": bool(plan.prefix_folder),
        "--target-device and --drafter-device": plan.two_devices,
        "--weights other than float": plan.weights not in ("auto", "float"),
        "--kernels native": plan.kernels == "native",
        "--activations int8": plan.activations == "int8",
        "--steps-per-call above 1": plan.steps_per_call > 1,
        "--weight-layout": plan.weight_layout not in ("auto", "row_major"),
    }


def open_hosted(options: argparse.Namespace) -> Any:
    """Open the chosen models; with `--hosts`, their engines run on workers.

    Raises:
      RequestError: no cluster answers at the address of `--ray`.
    """
    if options.hosts == 1:
        return open_pair(options)
    import jax

    from dflash_jax.hosts.launch import ChildLauncher
    from dflash_jax.hosts.pair import HostedPair

    jax.config.update("jax_platforms", "cpu")  # this process must not take a worker's devices
    if options.ray is None:
        launcher: Any = ChildLauncher()
    else:
        from dflash_jax import ray

        launcher = ray.host_launcher(options.ray, options.hosts)
    pair = open_pair(options)
    data, model = chosen_plan(options).mesh
    sources = {
        "target": options.target,
        "drafter": chosen_drafter(options),
        "layer_ids": options.layer_ids,
        "lora": options.lora,
    }
    devices = data * model // options.hosts if data * model > 1 else 0
    return HostedPair(pair, sources, launcher, hosts=options.hosts, devices=devices)
