"""Options of `dflash-jax serve --hosts`, checked before a process starts."""

import json
import sys

import pytest

from dflash_jax import Plan
from dflash_jax.cli import main
from dflash_jax.errors import HostError, PlanError
from dflash_jax.networks import build_pair
from dflash_jax.plan import ResolvedPlan
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server import serving_hosts
from dflash_jax.server.serving_hosts import HostDevices, completed
from dflash_jax.testing import AMPLE, tiny_target
from dflash_jax.utils import child_processes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hosts 0", "--hosts is 0; expected an integer of at least 1"),
        ("--ray auto", "--hosts is 1 with --ray; expected a number of processes, at least 2"),
        ("--hosts 2 --model b=tiny", "--model cannot be used with --hosts 2; leave it"),
        ("--hosts 2 --prefix-folder x", "--prefix-folder cannot be used with --hosts"),
        ("--hosts 2 --drafter-device 1", "--target-device and --drafter-device cannot"),
        ("--hosts 2 --weights int8", "--weights other than float cannot be used"),
        ("--hosts 2 --kernels native", "--kernels native cannot be used"),
        ("--hosts 2 --steps-per-call 4", "--steps-per-call above 1 cannot be used"),
        ("--hosts 2 --mesh 1x3", "--mesh 1x3 has 3 devices, which 2 hosts cannot share"),
        ("--hosts 2 --host-index 1", "--host-index and --coordinator go together"),
        ("--hosts 2 --coordinator a:1", "--host-index and --coordinator go together"),
        ("--hosts 2 --host-index 2 --coordinator a:1", "--host-index is 2 of --hosts 2; expected"),
        ("--hosts 2 --host-index 1 --coordinator a", "--coordinator is 'a'; expected HOST:PORT"),
        ("--hosts 2 --ray auto --host-index 0 --coordinator a:1", "--ray places the hosts itself"),
    ],
)
def test_what_cannot_work_over_hosts_is_refused_at_once(
    flags: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(child_processes, "start_module", None)
    assert main(["serve", *flags.split()]) == 1
    error = capsys.readouterr().err
    assert f"RequestError: {message}" in error
    assert error.count("\n") == 1


def test_without_ray_the_option_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--hosts", "2", "--ray", "auto"]) == 1
    assert "pip install -e '.[ray]'" in capsys.readouterr().err


def test_the_other_processes_of_this_machine_get_the_same_options() -> None:
    plan = Plan(rows=3, mesh=(1, 2), prefix_cache=2**20)
    options = ServeOptions(hosts=2, host_index=0, coordinator="a:1", plan=plan, alias=("x=tiny",))
    module, text = serving_hosts._words(options, 1)
    assert module == serving_hosts.__name__
    read = ServeOptions.parse(json.loads(text))
    assert read.host_index == 1
    assert vars(read) | {"host_index": 0} == vars(options)


def test_the_mesh_is_over_all_devices_of_the_hosts() -> None:
    pair = build_pair(tiny_target(num_heads=8, num_kv_heads=4), None)
    both = [HostDevices("cpu", 2, AMPLE)] * 2
    plan = Plan(rows=2)
    assert completed(plan, both, pair).mesh == (1, 4)
    eight = [HostDevices("cpu", 4, AMPLE)] * 2
    assert completed(plan, eight, pair).mesh == (2, 4)
    assert completed(Plan(rows=3), eight, pair).mesh == (1, 8)
    made = completed(Plan(rows=2, mesh=(2, 2)), both, pair)
    assert made.mesh == (2, 2)
    assert isinstance(made, ResolvedPlan)
    with pytest.raises(PlanError, match="mesh is 1 x 2, but 2 hosts have 4 devices, 2 each; leave"):
        completed(Plan(mesh=(1, 2)), both, pair)

    for other, named in (
        (HostDevices("cpu", 1, AMPLE), r"host 0 has 2 of cpu; host 1 has 1 of cpu"),
        (HostDevices("gpu", 2, AMPLE), r"host 0 has 2 of cpu; host 1 has 2 of gpu"),
    ):
        with pytest.raises(HostError, match=named):
            completed(Plan(), [both[0], other], pair)
