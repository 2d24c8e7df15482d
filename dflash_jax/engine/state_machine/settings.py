"""The settings of recovery, and strict parsers for environment variables."""

import dataclasses
import math
import re
from collections.abc import Mapping

from dflash_jax.declared import Declared, declare, document
from dflash_jax.errors import ConfigError

ROOM_FOR_CALL = 16  # tokens a forced call needs after its beginning
_AT_LEAST_2 = "0 (off) or an integer of at least 2: 1 would end every output at its first"


# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery(Declared):
    """Rules that act when a model goes silent, stalls or loops. The defaults are for agents.

    Without this object (`recovery=None`) every rule is off and nothing changes.
    """

    _noun = "field of a dj.Recovery"

    floor: int = declare(
        256,
        "output length below which an end token becomes the next best token while the output has"
        " no text but thoughts. An end token inside a thought closes the thought, at any length."
        " 0 turns all rules about end tokens off",
    )
    tool_prefix: bool = declare(
        True,
        "force the beginning of a tool call where an output of any length stalls: its text"
        " announces an action, and the target finds a call likely enough. The target chooses among"
        " the request's `tools`. Needs a floor",
    )
    tool_call_threshold: float = declare(
        -5.0,
        "log-ratio of the probabilities of a call and of the end from which an end counts as a"
        " stall. An end without a cue never does. A colon, a dash or an ellipsis lowers it by 3,"
        ' an announcement such as "Let me look at it." by 20, or by 8 if its verb is not known; a'
        " question in the last paragraph or unfinished code raises it by 3. A JSON object in a"
        " code fence that names a declared tool needs no such ratio",
        minimum=-math.inf, expected="a number such as -5.0",
    )
    call_retry: bool = declare(
        True,
        "decode a call that cannot be parsed, or is not finished, again from its opening under the"
        " grammar of the declared tools. A call is held until it is complete, or longer than 512"
        " tokens; opening markers of several tokens are emitted. Needs a floor, the extra"
        " `structured`, and a syntax whose calls begin with a marker, which harmony's do not",
    )
    fenced_calls: bool = declare(
        True,
        "a JSON object in a code fence at the end of the output is a call if it holds exactly a"
        " declared tool's name and arguments, and is not given as an example",
    )
    skip_phrase: str = declare(
        " done",
        "an output that ends in this phrase, apart from punctuation, is not stalled",
    )
    empty_retry: bool = declare(
        True, "decode again without drafts if nothing visible was generated"
    )
    repeat_limit: int = declare(
        0,
        "end the output at this many equal tokens, whatever they say; 0 is off",
        minimum=2, off=True, expected=f"{_AT_LEAST_2} token",
    )
    loops: bool = declare(
        True,
        "end the output when it repeats itself: a unit of 1 to 8 tokens at 12 copies and"
        " `loop_tokens` tokens, one of 9 to 512 at three copies and twice as many; later in verse,"
        " code, lists, tables and data, and latest in code fences and calls (`LIMITS` in"
        " `engine/state_machine/loops.py`). Prose that is equal but for its numbers ends it at 12"
        " copies and 512 tokens",
    )
    loop_tokens: int = declare(
        96, "tokens of text that a loop may not reach, at least 2", minimum=2
    )
    watchdog: bool = declare(
        True,
        "after a thought that had to be closed, halve the tokens that `loops` allows units of 9 to"
        " 80 tokens",
    )
    repeated_calls: int = declare(
        3,
        "end the output at this many equal tool calls in a row; 0 is off. The tokens include all"
        " of them; over HTTP the caller receives the first",
        minimum=2, off=True, expected=f"{_AT_LEAST_2} call",
    )
    max_calls: int = declare(
        48, "end the output after this many tool calls in one turn; 0 is off"
    )
    min_tokens: int = declare(
        0, "below this many output tokens, every end token is replaced by the next best token"
    )
    answer_reserve: int = declare(
        0,
        "close a thought that is still open when only this many of `max_tokens` remain; 0 never"
        " does. Half of `max_tokens` is reserved if this is all of them or more",
    )
    close_text: str | None = declare(
        None, "text that closes a thought; by default the text of the model's family"
    )
    floor_in_thought: bool = declare(False, "let the floor act inside an open thought too")
    deadline_s: float | None = declare(
        None,
        "seconds from submission after which the output ends",
        minimum=math.ulp(0), expected="seconds above 0, or None",
    )
    log_directory: str | None = declare(
        None, "write recovery events to a capped file in this directory"
    )
    # fmt: on

    @property
    def ends_loops(self) -> bool:
        """Whether a rule ends outputs that repeat a text or a token."""
        return self.repeat_limit > 0 or self.loops

    @property
    def counts_calls(self) -> bool:
        """Whether any rule counts tool calls."""
        return self.repeated_calls > 0 or self.max_calls > 0

    def for_structure(self) -> "Recovery":
        """Return the rules that apply to structured output, whose grammar decides how it ends.

        No token is forced and no end token replaced; loops, deadlines and failures still count.
        """
        return dataclasses.replace(
            self,
            floor=0,
            tool_prefix=False,
            call_retry=False,
            fenced_calls=False,
            empty_retry=False,
            min_tokens=0,
            answer_reserve=0,
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Recovery":
        """Return the default rules as two environment variables change them.

        DFLASH_MIN_TOKENS is the default of `floor`, and DFLASH_STALL_TOOL_PREFIX that of
        `tool_prefix`. The library never reads the process's environment; a serving command passes
        it here.

        Raises:
          ConfigError: a value is no whole number, or no clear yes or no.
        """
        return cls(
            floor=integer(environment, "DFLASH_MIN_TOKENS", cls.floor),
            tool_prefix=flag(environment, "DFLASH_STALL_TOOL_PREFIX", cls.tool_prefix),
        )


document(Recovery)

OFF = dataclasses.replace(
    Recovery().for_structure(),
    loops=False,
    watchdog=False,
    repeated_calls=0,
    max_calls=0,
)

NO = {"0", "false", "no", "off", "n", "f", "disable", "disabled", "none"}
YES = {"1", "true", "yes", "on", "y", "t", "enable", "enabled"}


def flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    """Return a yes or no, or the default if unset or blank; raise ConfigError for anything else."""
    word = environment.get(name, "").strip().lower()
    if not word:
        return default
    if word not in NO | YES:
        raise ConfigError(f"{name} is {word!r}; expected 1 or 0, true or false, yes or no, on, off")
    return word in YES


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number, or the default if unset or blank; raise ConfigError otherwise."""
    text = environment.get(name, "").strip() or str(default)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigError(f"{name} is {text[:40]!r}; expected a whole number such as 64, or 0")
    return int(text)
