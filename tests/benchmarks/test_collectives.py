"""Counting of bytes and collectives from optimised HLO."""

import pytest

from benchmarks.compile_for.hlo import Machine, counted, groups
from benchmarks.compile_for.hosts import table

MACHINE = Machine("test", local=2, memory=4e4)
HLO = """HloModule step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: bf16[8,4]) -> f32[8] {
  %p.1 = bf16[8,4]{1,0} parameter(0), metadata={op_name="arguments[0]['target']['o']"}
  %p.2 = f32[1000,4]{1,0} parameter(1), metadata={op_name="arguments[0]['target']['embed']"}
  %p.3 = bf16[2,16]{1,0} parameter(2), metadata={op_name="arguments[1].target[0].k"}
  %p.4 = s32[8]{0} parameter(3), metadata={op_name="arguments[3].rules.limit"}
  %r.1 = f32[100]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %r.2 = (f32[10]{0}, s32[10]{0}) all-reduce(%x, %y), replica_groups=[2,2]<=[4], to_apply=%add
  %g = f32[100]{0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %s = f32[25]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %one = f32[25]{0} all-reduce(%x), replica_groups=[4,1]<=[4], to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            [[0, 2], [1, 3]],
        ),
        ("source_target_pairs={{0,1},{1,2}}", [[0, 1], [1, 2]]),
    ],
)
def test_groups_are_read_in_every_notation(text: str, expected: list[list[int]]) -> None:
    assert groups(text, 4) == expected


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown groups"):
        groups("replica_groups=mesh['a'=4] {'a':(1)2}", 4)


def test_a_step_is_counted_by_its_shapes_and_groups() -> None:
    found = counted(HLO, MACHINE, 4)
    assert (found["weights"], found["caches"]) == (64, 64)
    assert found["held"] == 64 + 16000 + 64 + 32
    assert found["calls"]["local"] == {"all-reduce": 2}
    assert found["calls"]["network"] == {"all-gather": 1, "reduce-scatter": 1}
    local, network = 400 + 80, 200 + 300  # twice half of both reductions; half, three quarters
    assert found["sent"] == {"local": local, "network": network}


def test_a_collective_in_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        counted(HLO.replace("ENTRY %main", "%body").replace("%add (", "ENTRY %add ("), MACHINE, 4)


def test_the_table_names_what_does_not_fit() -> None:
    step = counted(HLO, MACHINE, 4)
    lines = table({"m, two hosts, 2 x 2": {"memory": 1e4, "steps": {"plain": step}}})
    assert lines[-1].startswith("| m, two hosts | 2 x 2 | plain | 0.0 GB: does not fit |")
    assert lines[-1].endswith("| 2, 2 | 0.5 kB, 0.5 kB |")
