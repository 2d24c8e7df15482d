"""The settings of recovery, and strict parsers for environment variables."""

import dataclasses
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, get_args

from dflash_jax.errors import ConfigError

BelowFloor = Literal["odds", "rescue", "replace", "compat"]
Watchdog = Literal["off", "on", "compat"]
Runaway = bool | Literal["measured", "compat", "off"]
REPEATS = 32  # of one token, once the floor is on
ROOM_FOR_CALL = 16  # tokens a forced call needs after its beginning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """Rules that act when a model goes silent, stalls or loops. The defaults are for agents.

    Without this object (`recovery=None`) every rule is off and nothing changes.

    Attributes:
      floor: minimum of output tokens below which end tokens are examined; 0 turns all rules about
        end tokens off.
      below_floor: what becomes of an end token. "odds", the default: at any length, it becomes the
        beginning of a tool call if the target itself finds a call of a declared tool likely enough,
        and it closes the thought it would end in; below the floor, it is replaced by the next best
        token while the output has no text but thoughts. The other rules examine end tokens below
        the floor only, by the text alone. "rescue": after a stalled preamble it becomes the
        beginning of a call, and before anything visible the next best token. "replace": it becomes
        the next best token, unless the output stalled. "compat": stalls are detected by token ids.
      tool_prefix: force the beginning of a tool call at a stall. The target chooses among the tools
        of the request's `tools`. Needs a floor.
      call_odds: for "odds", the least log-ratio of the probabilities of a call and of the end at
        which an end counts as a stall. A colon, a dash or an ellipsis at the end, or a last
        sentence such as "Let me look at it.", lowers it by 3; a question in the last paragraph or
        unfinished code raises it by 3.
      call_retry: decode a call that cannot be parsed, or is not finished, again from its opening
        under the grammar of the declared tools. A call is held until it is complete, or longer than
        512 tokens. Needs "odds", and the extra `structured`.
      skip_phrase: an output that ends in this phrase is not stalled.
      empty_retry: decode again without drafts if nothing visible was generated.
      runaway: how loops end the output. "measured": a unit of 1 to 8 tokens ends it at 12 copies
        and `loop_tokens` tokens, one of 9 to 80 at three copies and twice as many; in code, table
        rules, numbers and literals later (`engine/recovery/loops.py` has the table). "compat", or
        True: 12 copies of a unit of 1 to 8 tokens end it, however short. "off", or False: none do.
      loop_tokens: tokens of text that a measured loop may not reach, at least 2.
      repeat_limit: end the output at this many equal tokens; 0 is off. None leaves it to the
        measured rule or, if that is off, is 32 with a floor and 0 without.
      watchdog: after a thought that had to be closed, end the output when it becomes periodic:
        "on" halves what the measured rule allows longer units or, if that is off, needs three
        copies and 48 tokens; "compat" needs two copies.
      repeated_calls: end the output at this many equal tool calls in a row; 0 is off. The tokens
        include all of them; over HTTP the caller receives the first.
      min_tokens: below this many output tokens, every end token is replaced by the next best token.
      answer_reserve: close a thought that is still open when only this many of `max_tokens` remain;
        0 never does. Half of `max_tokens` is reserved if this is all of them or more.
      close_text: text that closes a thought; by default the text of the model's family.
      floor_in_thought: let the floor act inside an open thought too.
      deadline_s: seconds from submission after which the output ends.
      log_directory: write recovery events to a capped file in this directory.
    """

    floor: int = 256
    below_floor: BelowFloor = "odds"
    tool_prefix: bool = True
    call_odds: float = -5.0
    call_retry: bool = True
    skip_phrase: str = " done"
    empty_retry: bool = True
    repeat_limit: int | None = None
    runaway: Runaway = "measured"
    loop_tokens: int = 96
    watchdog: Watchdog = "on"
    repeated_calls: int = 3
    min_tokens: int = 0
    answer_reserve: int = 0
    close_text: str | None = None
    floor_in_thought: bool = False
    deadline_s: float | None = None
    log_directory: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # NumPy's numbers become Python's
            value = getattr(self, field.name)
            if isinstance(value, Real) and not isinstance(value, bool):
                whole = isinstance(value, Integral)
                object.__setattr__(self, field.name, int(value) if whole else float(value))
        for name in ("floor", "min_tokens", "answer_reserve"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} is {value!r}; expected an integer from 0")
        for name in ("tool_prefix", "call_retry", "empty_retry", "floor_in_thought"):
            if type(value := getattr(self, name)) is not bool:
                raise ConfigError(f"{name} is {value!r}; expected True or False")
        for name in ("skip_phrase", "close_text", "log_directory"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "skip_phrase"):
                raise ConfigError(f"{name} is {value!r}; expected a text")
        for name, kind in (("below_floor", BelowFloor), ("watchdog", Watchdog)):
            if (value := getattr(self, name)) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigError(f"{name} is {value!r}; expected one of {known}")
        self._check_runaway()
        if type(self.loop_tokens) is not int or self.loop_tokens < 2:
            raise ConfigError(f"loop_tokens is {self.loop_tokens!r}; expected an integer from 2")
        calls = self.repeated_calls
        if type(calls) is not int or calls < 0 or calls == 1:
            raise ConfigError(
                f"repeated_calls is {calls!r}; expected 0 (off) or an integer of at least 2:"
                " 1 would end every output at its first call"
            )
        if type(self.call_odds) not in (int, float) or self.call_odds != self.call_odds:
            raise ConfigError(f"call_odds is {self.call_odds!r}; expected a number such as -5.0")
        limit = self.repeat_limit
        if limit is not None and (type(limit) is not int or limit == 1):
            raise ConfigError(
                f"repeat_limit is {limit!r}; expected 0 (off) or an integer of at least 2:"
                " 1 would end every output at its first token"
            )
        deadline = self.deadline_s
        if deadline is not None and not (type(deadline) in (int, float) and deadline > 0):
            raise ConfigError(f"deadline_s is {deadline!r}; expected seconds above 0, or None")

    def _check_runaway(self) -> None:
        """Check `runaway`, and write "compat" and "off" as their booleans."""
        value = {"compat": True, "off": False}.get(str(self.runaway), self.runaway)
        if value != "measured" and type(value) is not bool:
            raise ConfigError(
                f"runaway is {value!r}; expected one of measured, compat, off, or True or False"
            )
        object.__setattr__(self, "runaway", value)

    @property
    def measures(self) -> bool:
        """Whether loops are judged by the measured rule."""
        return self.runaway == "measured"

    @property
    def repeats(self) -> int:
        """Equal tokens that end an output; 0 is off. A negative limit counts as not given."""
        if self.repeat_limit is None or self.repeat_limit < 0:
            if self.measures:
                return 0
            return REPEATS if self.floor else 0
        return self.repeat_limit

    def for_structure(self) -> "Recovery":
        """Return the rules that apply to structured output, whose grammar decides how it ends.

        No token is forced and no end token replaced; loops, deadlines and failures still count.
        """
        return dataclasses.replace(
            self,
            floor=0,
            tool_prefix=False,
            call_retry=False,
            empty_retry=False,
            min_tokens=0,
            answer_reserve=0,
            repeat_limit=self.repeats,
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Recovery":
        """Return the settings of the original engines' environment variables; off without them.

        The library never reads the process's environment; a serving command passes it here.

        Raises:
          ConfigError: a value that is neither a clear yes or no, or not a whole number.
        """
        floor = integer(environment, "DFLASH_MIN_TOKENS", 0)
        repeats = integer(environment, "DFLASH_DEGENERATE_RUN_TOKENS", -1)
        prefix = flag(environment, "DFLASH_STALL_TOOL_PREFIX")
        return dataclasses.replace(
            OFF,
            floor=floor,
            below_floor="replace" if floor and not prefix else "rescue",
            tool_prefix=prefix,
            repeat_limit=repeats if repeats >= 0 else None if floor else 0,
        )


OFF = Recovery(
    floor=0,
    below_floor="rescue",
    tool_prefix=False,
    call_retry=False,
    empty_retry=False,
    repeat_limit=0,
    runaway=False,
    watchdog="off",
    repeated_calls=0,
)

NO = {"", "0", "false", "no", "off", "n", "f", "disable", "disabled", "none"}
YES = {"1", "true", "yes", "on", "y", "t", "enable", "enabled"}


def flag(environment: Mapping[str, str], name: str) -> bool:
    """Return a yes or no; unset is no.

    Raises:
      ConfigError: anything else.
    """
    word = environment.get(name, "").strip().lower()
    if word not in NO | YES:
        raise ConfigError(f"{name} is {word!r}; expected 1 or 0, true or false, yes or no, on, off")
    return word in YES


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number; unset or empty is the default.

    Raises:
      ConfigError: anything else.
    """
    text: Any = environment.get(name, "").strip()
    if not text:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ConfigError(f"{name} is {text!r}; expected a whole number such as 64")
    return int(text)
