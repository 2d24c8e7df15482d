"""Every recovery event but retried calls, by one block size; `tests/soak` runs all of both."""

from tests.soak.recovery_events import scenarios, sweep


def test_every_event_gives_the_same_output_in_all_modes() -> None:
    compared = sweep([5], [(9,), (0, 2, 1)], structured=False)
    events = {scenario.event for scenario in scenarios(structured=False)}
    assert set(compared) == {event or "none" for event in events}
    assert min(compared.values()) >= 2
