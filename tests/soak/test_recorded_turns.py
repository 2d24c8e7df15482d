"""20,000 turns of the audit's scenarios, recorded and run again in another process."""

import pytest

from tests.soak.recorded_turns import run

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")


@pytest.mark.soak
def test_scenarios_of_the_audit_run_again_in_another_process() -> None:
    assert run(20_000) > 10_000  # some turns are not recorded
