"""V: environment variables are parsed strictly, and settings are checked."""

from typing import Any

import numpy as np
import pytest

from dflash_jax.engine.state_machine import Recovery
from dflash_jax.engine.state_machine.settings import flag, integer
from dflash_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param(None, False, id="V1"),
        pytest.param("", False, id="V1-empty"),
        *(pytest.param(t, False, id=f"V2-{t}") for t in ("0", "false", "FALSE", "no", "Off")),
        *(pytest.param(t, True, id=f"V3-{t}") for t in ("1", "true", "yes", "on", "Enabled")),
        pytest.param(" 0 ", False, id="V4"),
    ],
)
def test_flags_are_clear(text: str | None, value: bool) -> None:
    assert flag({} if text is None else {"A": text}, "A", False) is value
    assert flag({} if text is None else {"A": text}, "A", True) is (value or not text)


def test_V5_an_ambiguous_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="A is 'maybe'; expected 1 or 0"):
        flag({"A": "maybe"}, "A", True)


def test_V6_numbers_are_whole_or_refused() -> None:
    assert integer({}, "N", 5) == integer({"N": " "}, "N", 5) == 5
    assert integer({"N": " 12 "}, "N", 5) == 12
    for text in ("12abc", "abc", "1.5", "-3", "--2", "9" * 5000, "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(ConfigError, match="expected a whole number"):
            integer({"N": text}, "N", 5)


def test_environment_variables_change_two_defaults() -> None:
    assert Recovery.from_environment({"HOME": "/"}) == Recovery()
    chosen = {"DFLASH_MIN_TOKENS": "64", "DFLASH_STALL_TOOL_PREFIX": "off"}
    assert Recovery.from_environment(chosen) == Recovery(floor=64, tool_prefix=False)
    with pytest.raises(ConfigError, match="DFLASH_MIN_TOKENS is '6x'"):
        Recovery.from_environment({"DFLASH_MIN_TOKENS": "6x"})


def test_numbers_may_be_those_of_numpy() -> None:
    given = Recovery(floor=np.int64(6), repeat_limit=np.int32(9), deadline_s=np.float32(2.5))
    assert given == Recovery(floor=6, repeat_limit=9, deadline_s=2.5)
    assert {type(x) for x in (given.floor, given.repeat_limit, given.deadline_s)} == {int, float}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"floor": -1}, "floor is -1; expected an integer of at least 0"),
        ({"floor": 2.0}, "floor is 2.0; expected an integer"),
        ({"tool_prefix": 1}, "tool_prefix is 1; expected true or false"),
        ({"watchdog": "on"}, "watchdog is 'on'; expected true or false"),
        ({"repeat_limit": 1}, "repeat_limit is 1; expected 0"),
        ({"repeat_limit": -5}, "repeat_limit is -5; expected 0"),
        ({"repeat_limit": None}, "repeat_limit is None; expected 0"),
        ({"loops": 1}, "loops is 1; expected true or false"),
        ({"loop_tokens": 1}, "loop_tokens is 1; expected an integer of at least 2"),
        ({"repeated_calls": -1}, "repeated_calls is -1; expected 0"),
        ({"deadline_s": 0}, "deadline_s is 0; expected seconds above 0"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recovery(**fields)
