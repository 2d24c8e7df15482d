"""Is an output looping? Pure looks at its tail, one per way to loop."""

from collections.abc import Sequence

from dflash_jax.engine.recovery.settings import Recovery

LONGEST_UNIT, COPIES, KEPT = 8, 12, 3  # of a runaway loop
PERIODS = range(12, 81)  # of the watchdog
LEAST_REPEATED = 48


def tail(ids: Sequence[int], recovery: Recovery) -> list[int] | None:
    """As much of the output's end as `looping` looks at; None if no guard is on."""
    if not (recovery.repeats or recovery.runaway or recovery.watchdog != "off"):
        return None
    return list(ids[-max(recovery.repeats, 3 * PERIODS[-1]) :])


def looping(ids: Sequence[int], recovery: Recovery, *, closed: bool) -> str | None:
    """The kind of loop the output has just run into: "repeat", "runaway", "period" or None.

    Args:
      closed: whether a thought had to be closed; only then the watchdog looks.
    """
    if recovery.repeats and len(ids) >= recovery.repeats:
        last = ids[-recovery.repeats :]
        if last[0] == last[-1] and len(set(last)) == 1:
            return "repeat"
    if recovery.runaway and runaway_drop(ids):
        return "runaway"
    if closed and recovery.watchdog != "off":
        compat = recovery.watchdog == "compat"
        if is_periodic(ids, copies=2 if compat else 3, least=0 if compat else LEAST_REPEATED):
            return "period"
    return None


def runaway_drop(ids: Sequence[int]) -> int:
    """Ids at the end that are one loop too many: all but three copies of its unit; 0 if none.

    A loop is at least twelve copies of a unit of one to eight ids; the shortest unit counts.
    """
    for period in range(1, LONGEST_UNIT + 1):
        if len(ids) < COPIES * period:
            break
        if ids[-1] != ids[-1 - period]:
            continue
        same = period
        while same < len(ids) and ids[-1 - same] == ids[-1 - same + period]:
            same += 1
        copies = same // period
        if copies >= COPIES:
            return (copies - KEPT) * period
    return 0


def is_periodic(ids: Sequence[int], *, copies: int, least: int) -> bool:
    """Whether the end is `copies` or more of a unit of 12 to 80 ids, `least` ids in all."""
    for period in PERIODS:
        wanted = period * max(copies, -(-least // period))
        if len(ids) < copies * period:
            return False
        if len(ids) < wanted or ids[-1] != ids[-1 - period]:
            continue
        last = ids[-wanted:]
        if last[period:] == last[:-period]:
            return True
    return False
