"""Devices to compile for, which are not here."""

import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compile_for.hlo import V5E, V6E
from dflash_jax.errors import PlanError, RequestError

# Multiprocessors, bytes per second, bytes of L2, GHz, bytes of memory, compute capability.
GPUS = {
    "H100": (132, 3352320000000, 52428800, 1.98, 84942979072, 9),
    "H200": (132, 4800000000000, 52428800, 1.98, 150754820096, 9),
    "B200": (148, 7672320000000, 132644864, 1.965, 191514411008, 10),
}
GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {} l2_cache_size: {}
  clock_rate_ghz: {} device_memory_size: {} shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "NVIDIA {}"
"""
# Topologies by the number of chips. One chip is a part of the smallest.
FLAT = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
TPUS = {"v5e": FLAT, "v5p": {1: "2x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}, "v6e": FLAT}
MACHINES = {"v5e": V5E, "v6e": V6E}  # whose collectives are counted
NAME = re.compile(r"(\w+?)(?:-(\d+)|:(\d+(?:x\d+)*))?")


def devices(name: str, cuda: Path | None = None) -> list[Any]:
    """Return devices to compile for.

    Args:
      name: a GPU or a TPU, with a number of chips as in "v5e-8" or a topology as in "v5e:2x4".
      cuda: folder with JAX's plugin for GPUs.

    Raises:
      RequestError: the device is unknown, or the package that compiles for it is missing.
      PlanError: there is no such topology.
    """
    match = NAME.fullmatch(name)
    kind, count, topology = match.groups() if match else ("", None, None)
    known = [*GPUS, *TPUS]
    if kind not in known or (topology and kind in GPUS):
        raise RequestError(
            f"device {name!r} is unknown; known: {', '.join(known)}, with a number of chips as in"
            " v6e-8, or the topology of a TPU as in v6e:2x4"
        )
    chips = int(count or 1)
    if kind in GPUS:
        return _gpus(kind, chips, cuda)
    if not topology and chips not in TPUS[kind]:
        sizes = ", ".join(map(str, TPUS[kind]))
        raise PlanError(f"{name} has {chips} chips; expected one of {sizes}")
    made = _tpus(f"{kind}:{topology or TPUS[kind][chips]}")
    return made if topology else made[:chips]


def _gpus(kind: str, chips: int, cuda: Path | None) -> list[Any]:
    from jax._src.lib import xla_client

    library = Path("" if cuda is None else cuda) / "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    if cuda is None or not library.is_file():
        raise RequestError(f"no {library}; --cuda is the folder of JAX's plugin (see --help)")
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    topology = xla_client.make_c_api_device_topology(
        api, "", target_config=GPU.format(*GPUS[kind], kind), topology=f"1x1x{chips}"
    )
    return topology._make_compile_only_devices()


def _tpus(topology: str) -> list[Any]:
    import jax
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise RequestError("libtpu is not installed: pip install -e '.[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no host of a TPU to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device, so none to lock
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"there is no TPU topology {topology}: {reason}") from error


def mesh_of(text: str | None, where: list[Any]) -> Any:
    """Return a mesh of devices, or None for a single one.

    Args:
      text: shape of the mesh, as DATAxMODEL.

    Raises:
      PlanError: it does not have as many devices.
    """
    from jax.sharding import Mesh

    from dflash_jax.graph.placement import AXES

    shape = text or f"1x{len(where)}"
    sizes = [int(n) for n in shape.split("x") if n.isdecimal()]
    if len(sizes) != 2 or shape.count("x") != 1 or math.prod(sizes) != len(where):
        raise PlanError(
            f"mesh is {shape!r} for {len(where)} devices; expected DATAxMODEL whose product is that"
        )
    return Mesh(np.asarray(where).reshape(sizes), AXES) if len(where) > 1 else None
