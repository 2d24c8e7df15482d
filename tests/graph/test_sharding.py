"""Plans over a mesh of virtual devices, each in a process of its own."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dflash_jax import Plan
from dflash_jax.errors import PlanError
from dflash_jax.families import drafter_kinds
from dflash_jax.graph import Graph
from dflash_jax.graph.placement import device_mesh
from dflash_jax.graph.resolve import resolve
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.testing import (
    AMPLE,
    planned,
    random_params,
    tiny_drafter,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)

CASE = Path(__file__).with_name("mesh_case.py")
FLAGS = os.environ.get("XLA_FLAGS", "")  # compiling faster, in `make test`
DEVICES = f"{FLAGS} --xla_force_host_platform_device_count="


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "devices", "meshes"),
    [
        ("quick", 4, ["2x2"]),
        *(
            pytest.param(family, 8, ["1x4", "2x2", "4x2"], marks=pytest.mark.soak)
            for family in ("dense", "moe", "gpt_oss", "hybrid", "gemma")
        ),
    ],
)
def test_several_devices_say_what_one_says(family: str, devices: int, meshes: list[str]) -> None:
    """Prompts of one to three chunks, a prefix found again, rows and heads split."""
    run = subprocess.run(
        [sys.executable, str(CASE), family, *meshes],
        env=os.environ | {"XLA_FLAGS": DEVICES + str(devices), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["devices"] == devices
    for mesh in meshes:
        assert found["said"][mesh] == found["said"]["1x1"], mesh
        assert found["shares"][mesh] < 0.8  # of the bytes, on one device


@pytest.mark.soak
def test_every_family_says_the_same_with_its_heads_and_widths_split() -> None:
    run = subprocess.run(
        [sys.executable, str(CASE), "every"],
        env=os.environ | {"XLA_FLAGS": DEVICES + "2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == 6
    for family, said in found.items():
        assert said["equal"], family
        assert said["error"] < 1e-4, family
        assert said["share"] < 0.8, family


def test_meshes_that_cannot_be_are_refused_by_name() -> None:
    for mesh in ((0, 1), (3, 1), (1,), "2x2", (1, 2.0)):
        with pytest.raises(PlanError, match="mesh is "):
            Plan(rows=4, mesh=mesh)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="mesh is 64 x 64, but there are 1 devices; make it smal"):
        device_mesh(Plan(rows=64, mesh=(64, 64)))
    assert device_mesh(Plan(rows=4)) is None


def test_a_graph_runs_on_the_devices_of_a_mesh_that_it_is_given() -> None:
    pair, device = build_pair(tiny_target(), None), jax.devices()[0]
    plan = Plan(rows=2, max_length=32, chunk=16, block=4)
    graph = Graph(pair, plan, mesh=Mesh(np.asarray([[device]]), ("data", "stage")))
    assert graph.mesh is not None
    assert dict(graph.mesh.shape) == {"data": 1, "stage": 1, "model": 1}
    assert graph == Graph(pair, plan, mesh=graph.mesh) == graph.with_plan(lookahead=0)
    assert graph != Graph(pair, plan)
    params = graph.place_params(random_params(pair))
    assert {x.sharding.mesh for x in jax.tree.leaves(params)} == {graph.mesh}
    with pytest.raises(PlanError, match=r"mesh is '2x2'; expected a jax\.sharding\.Mesh"):
        Graph(pair, plan, mesh="2x2")  # type: ignore[arg-type]


def test_packed_weights_are_not_split() -> None:
    target = tiny_target()
    for mesh in ((2, 1), (1, 2)):
        plan = Plan(rows=2, mesh=mesh, weights="int8")
        with pytest.raises(PlanError, match=r"weights='int8' cannot be split.*weights='float'"):
            resolve(plan, build_pair(target, None), platform="cpu", memory=AMPLE)


def test_a_plan_with_a_mesh_survives_json() -> None:
    plan = Plan(rows=4, mesh=(2, 2))
    assert Plan.parse(plan.to_json()) == plan
    assert hash(plan) == hash(Plan.parse(plan.to_json()))


@pytest.mark.soak
def test_two_hosts_say_the_same() -> None:
    """Two processes with a device each, over the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    case = CASE.with_name("host_case.py")
    hosts = [
        subprocess.Popen(
            [sys.executable, str(case), address, str(host)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    outputs = [host.communicate(timeout=600) for host in hosts]
    assert all(host.returncode == 0 for host in hosts), [err[-2000:] for _, err in outputs]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    assert first["devices"] == 2
    assert first["said"][0] == first["said"][1]


@pytest.mark.exhaustive
def test_modules_declare_the_axes_of_heads_of_widths_and_of_the_vocabulary() -> None:
    """By the last part of a weight's path; every other weight stays whole."""
    expected = {
        "qkv": 1,
        "qkv_bias": 0,
        "sinks": 0,
        "q": 1,
        "kv": 1,
        "o": 0,
        "gate_up": 2,
        "gate_up_bias": 1,
        "down": 0,
        "experts_gate_up": 3,
        "experts_gate_up_bias": 2,
        "experts_down": 1,
        "head": 1,
    }
    own = {"own_embedding": True, "own_head": True, "attention_bias": True}
    seen = set()
    for target in (
        tiny_target(model_type="llama", attention_bias=True, mlp_bias=True),
        tiny_moe(),
        tiny_gpt_oss(),
        tiny_hybrid(num_experts=4, experts_per_token=2, expert_size=8, shared_expert_size=8),
        tiny_gemma(attention_bias=True),
    ):
        for kind in drafter_kinds():
            drafter = tiny_drafter(target, kind, **own)
            params = planned(target, drafter, Plan(dtype="float32")).params
            found = build_graph(target, drafter).model_axes
            for path, _ in jax.tree_util.tree_leaves_with_path(params):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                assert found.get(name) == expected.get(path[-1].key), name
            seen |= {path.rpartition("/")[2] for path in found}
    assert seen == {*expected}
