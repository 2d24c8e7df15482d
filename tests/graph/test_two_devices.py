"""Target and drafter on a device each, as virtual devices of a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax import Plan
from dflash_jax.errors import PlanError
from dflash_jax.graph.memory import budget
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.two_devices import devices
from dflash_jax.networks import build_pair
from dflash_jax.testing import AMPLE, planned, tiny_drafter, tiny_target

CASE = Path(__file__).with_name("two_devices_case.py")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("quick", ["apart"]),
        *(
            pytest.param(family, ["apart", "swapped"], marks=pytest.mark.soak)
            for family in ("dense", "hybrid", "gemma", "shipped")
        ),
    ],
)
def test_two_devices_say_what_one_says(family: str, names: list[str]) -> None:
    """In every variant, round by round, with prefixes found again on both devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    run = subprocess.run(
        [sys.executable, str(CASE), family, "together", *names],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["devices"] == 2
    for name in names:
        assert found[name] == found["together"], name
        greedy, plain = found[name]["greedy"], found[name]["plain"]
        assert greedy[: len(plain)] == plain
        count = len(plain)
        drafted = [greedy, found[name].get("sampled", [])]
        lengths = [length for case in drafted for length in case[count : 2 * count]]
        assert max(map(max, lengths)) > 1  # some draft was accepted


def test_places_that_cannot_be_are_refused_by_name() -> None:
    for places in ((1, 1), (-1, 0), (0,), "01", (0, 1.0)):
        with pytest.raises(PlanError, match="devices is "):
            Plan(devices=places)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"devices is \(0, 1\) and mesh \(1, 2\); expected"):
        Plan(devices=(0, 1), mesh=(1, 2))
    with pytest.raises(PlanError, match=r"devices is \(0, 9\), but there are 1, counted from 0"):
        devices(Plan(devices=(0, 9)))
    with pytest.raises(PlanError, match=r"devices is \(0, 1\), but there is no drafter"):
        resolve(Plan(devices=(0, 1)), build_pair(tiny_target(), None), platform="cpu", memory=AMPLE)
    plan = Plan(devices=(0, 1))
    assert Plan.parse(plan.to_json()) == plan


def test_a_drafter_elsewhere_takes_none_of_the_target_s_memory() -> None:
    target = tiny_target()
    drafter, sizes = tiny_drafter(target), {"max_length": 64, "chunk": 16}
    plan = resolve(Plan(**sizes), build_pair(target, drafter), platform="cpu", memory=AMPLE)
    both, alone = (
        budget(planned(target, drafter, plan)).total,
        budget(planned(target, None, plan)).total,
    )
    assert alone < both
    with pytest.raises(PlanError, match="the plan needs"):
        resolve(Plan(**sizes), build_pair(target, drafter), platform="cpu", memory=both - 1)
    resolve(
        Plan(**sizes, devices=(0, 1)), build_pair(target, drafter), platform="cpu", memory=both - 1
    )
