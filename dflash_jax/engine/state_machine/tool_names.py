"""Let the target choose the tool of a forced call among the declared ones.

The beginning of a call is known for each declared tool (`Words.calls`). The ids that all of them
share are forced. Where they differ, the device decides one token and stops, by the row's limit, and
`RowRules.choices` makes it report the best token that continues any of them. So the name depends
neither on drafting nor on the block size, and is always a declared one.
"""

from collections.abc import Sequence

from dflash_jax.engine.state_machine.words import Ids


def split(calls: Sequence[Ids]) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the ids that all call beginnings share, and the rest of each.

    The rest is empty if nothing remains to be chosen: one beginning is left, or one is complete.
    """
    calls = list(dict.fromkeys(calls))
    if len(calls) < 2:
        return (calls[0] if calls else ()), ()
    shared = 0
    while len({ids[shared : shared + 1] for ids in calls}) == 1 and len(calls[0]) > shared:
        shared += 1
    rest = tuple(ids[shared:] for ids in calls)
    return calls[0][:shared], rest if all(rest) else ()


def choices(calls: Sequence[Ids]) -> Ids:
    """Return the tokens that continue any of these beginnings, in ascending order."""
    return tuple(sorted({ids[0] for ids in calls}))


def following(calls: Sequence[Ids], token: int) -> tuple[Ids, ...]:
    """Return the rest of the beginnings that continue with a token, after it."""
    return tuple(ids[1:] for ids in calls if ids[0] == token)
