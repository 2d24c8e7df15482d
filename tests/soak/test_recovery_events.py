"""The sweep over all recovery events and block sizes."""

import pytest

from tests.soak.recovery_events import BLOCKS, scenarios, sweep

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")


@pytest.mark.soak
@pytest.mark.parametrize("pieces", [False, True])
def test_every_event_gives_the_same_output_in_all_modes_and_block_sizes(*, pieces: bool) -> None:
    compared = sweep(BLOCKS, pieces=pieces)
    events = {scenario.event or "none" for scenario in scenarios(structured=True)}
    assert set(compared) == events
