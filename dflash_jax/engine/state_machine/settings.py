"""The settings of recovery, and strict parsers for environment variables."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from dflash_jax.declared import unknown_names
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
      call_odds: for "odds", the log-ratio of the probabilities of a call and of the end from which
        an end counts as a stall. An end without a cue never does. A colon, a dash or an ellipsis
        lowers it by 3, an announcement such as "Let me look at it." by 20, or by 8 if its verb is
        not known; a question in the last paragraph or unfinished code raises it by 3. A JSON object
        in a code fence that names a declared tool needs no odds.
      call_retry: decode a call that cannot be parsed, or is not finished, again from its opening
        under the grammar of the declared tools. A call is held until it is complete, or longer than
        512 tokens; opening markers of several tokens are emitted. Needs "odds", the extra
        `structured`, and a syntax whose calls begin with a marker, which harmony's do not.
      skip_phrase: an output that ends in this phrase, apart from punctuation, is not stalled.
      empty_retry: decode again without drafts if nothing visible was generated.
      runaway: how loops end the output. "measured": a unit of 1 to 8 tokens ends it at 12 copies
        and `loop_tokens` tokens, one of 9 to 512 at three copies and twice as many; later in verse,
        code, lists, tables and data, and latest in code fences and calls (`LIMITS` in
        `engine/state_machine/loops.py`). Prose that is equal but for its numbers ends it at 12
        copies and 512 tokens. "compat", or True: 12 copies of a unit of 1 to 8 tokens end it,
        however short. "off", or False: none do.
      loop_tokens: tokens of text that a measured loop may not reach, at least 2.
      repeat_limit: end the output at this many equal tokens; 0 is off. None leaves it to the
        measured rule or, if that is off, is 32 with a floor and 0 without.
      watchdog: after a thought that had to be closed, end the output when it becomes periodic:
        "on" halves what the measured rule allows longer units or, if that is off, needs three
        copies and 48 tokens; "compat" needs two copies.
      repeated_calls: end the output at this many equal tool calls in a row; 0 is off. The tokens
        include all of them; over HTTP the caller receives the first.
      max_calls: end the output after this many tool calls in one turn; 0 is off.
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
    max_calls: int = 48
    min_tokens: int = 0
    answer_reserve: int = 0
    close_text: str | None = None
    floor_in_thought: bool = False
    deadline_s: float | None = None
    log_directory: str | None = None

    if not TYPE_CHECKING:  # where the fields are the arguments

        def __new__(cls, /, *values: Any, **fields: Any) -> "Recovery":
            """Check the names of fields, which Python would refuse in words of its own."""
            known = cls.__dataclass_fields__
            if values:
                raise ConfigError(f"got {values!r} without names; expected fields by name")
            if problem := unknown_names(fields, known, "field of a dj.Recovery"):
                raise ConfigError(problem)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's become Python's
                value = int(value) if isinstance(value, Integral) else float(value)
            if field.name == "runaway":
                value = {"compat": True, "off": False}.get(str(value), value)
            object.__setattr__(self, field.name, value)
            good, expected = _EXPECTED[field.name]
            if not good(value):
                raise ConfigError(f"{field.name} is {value!r}; expected {expected}")

    @property
    def measures(self) -> bool:
        """Whether loops are judged by the measured rule."""
        return self.runaway == "measured"

    @property
    def repeats(self) -> int:
        """Equal tokens that end an output; 0 is off. A negative limit counts as not given."""
        if self.repeat_limit is not None and self.repeat_limit >= 0:
            return self.repeat_limit
        return REPEATS if self.floor and not self.measures else 0

    @property
    def ends_loops(self) -> bool:
        """Whether any rule ends outputs that loop."""
        others = self.runaway or self.counts_calls or self.watchdog != "off"
        return bool(self.repeats or others)

    @property
    def counts_calls(self) -> bool:
        """Whether any rule counts tool calls."""
        return bool(self.repeated_calls or self.max_calls)

    @property
    def watches(self) -> bool:
        """Whether the watchdog looks for periods by the original rules."""
        return self.watchdog == "compat" or (self.watchdog == "on" and not self.measures)

    def for_structure(self) -> "Recovery":
        """Return the rules that apply to structured output, whose grammar decides how it ends.

        No token is forced and no end token replaced; loops, deadlines and failures still count.
        """
        off = dict.fromkeys(("tool_prefix", "call_retry", "empty_retry"), False)
        none = dict.fromkeys(("floor", "min_tokens", "answer_reserve"), 0)
        return dataclasses.replace(self, repeat_limit=self.repeats, **off, **none)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Recovery":
        """Return the settings of the original engines' environment variables; off without them.

        The library never reads the process's environment; a serving command passes it here. A value
        that is no clear yes or no, or no whole number, raises ConfigError.
        """
        floor = integer(environment, "DFLASH_MIN_TOKENS", 0)
        repeats = integer(environment, "DFLASH_DEGENERATE_RUN_TOKENS", -1)
        prefix = flag(environment, "DFLASH_STALL_TOOL_PREFIX")
        below = "replace" if floor and not prefix else "rescue"
        limit = repeats if repeats >= 0 else None if floor else 0
        ends: dict[str, Any] = {"floor": floor, "below_floor": below, "tool_prefix": prefix}
        return dataclasses.replace(OFF, repeat_limit=limit, **ends)


def _one_of(kind: Any) -> tuple[Callable[[Any], bool], str]:
    known = get_args(kind)
    return lambda x: x in known, f"one of {', '.join(known)}"


_NATURAL = lambda x: type(x) is int and x >= 0, "an integer from 0"
_SWITCH = lambda x: type(x) is bool, "True or False"
_TEXT = lambda x: x is None or isinstance(x, str), "a text"
_AT_LEAST_2 = "0 (off) or an integer of at least 2: 1 would end every output at its first"
_SECONDS = "seconds above 0, or None"
_RUNAWAY = "one of measured, compat, off, or True or False"
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("floor", "min_tokens", "answer_reserve"), _NATURAL),
    **dict.fromkeys(("tool_prefix", "call_retry", "empty_retry", "floor_in_thought"), _SWITCH),
    **dict.fromkeys(("close_text", "log_directory"), _TEXT),
    "skip_phrase": (lambda x: isinstance(x, str), "a text"),
    "below_floor": _one_of(BelowFloor),
    "watchdog": _one_of(Watchdog),
    "runaway": (lambda x: x == "measured" or type(x) is bool, _RUNAWAY),
    "loop_tokens": (lambda x: type(x) is int and x >= 2, "an integer from 2"),
    "repeated_calls": (lambda x: type(x) is int and x >= 0 and x != 1, f"{_AT_LEAST_2} call"),
    "max_calls": _NATURAL,
    "repeat_limit": (lambda x: x is None or (type(x) is int and x != 1), f"{_AT_LEAST_2} token"),
    "call_odds": (lambda x: type(x) in (int, float) and x == x, "a number such as -5.0"),
    "deadline_s": (lambda x: x is None or (type(x) in (int, float) and x > 0), _SECONDS),
}
OFF = dataclasses.replace(
    Recovery().for_structure(),
    below_floor="rescue",
    runaway=False,
    watchdog="off",
    repeated_calls=0,
    max_calls=0,
)

NO = {"", "0", "false", "no", "off", "n", "f", "disable", "disabled", "none"}
YES = {"1", "true", "yes", "on", "y", "t", "enable", "enabled"}


def flag(environment: Mapping[str, str], name: str) -> bool:
    """Return a yes or no, unset being no; raise ConfigError for anything else."""
    word = environment.get(name, "").strip().lower()
    if word not in NO | YES:
        raise ConfigError(f"{name} is {word!r}; expected 1 or 0, true or false, yes or no, on, off")
    return word in YES


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number, or the default if unset; raise ConfigError for anything else."""
    text = environment.get(name, "").strip() or str(default)
    if not re.fullmatch("-?[0-9]+", text):
        raise ConfigError(f"{name} is {text!r}; expected a whole number such as 64")
    return int(text)
