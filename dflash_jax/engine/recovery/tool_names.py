"""Which tool a forced call names: one of the declared, chosen by the target.

A call of a declared tool begins with ids that are known beforehand (`Words.calls`, one sequence a
tool). What all of them share is forced. Where they differ, the device decides one token and stops:
the row's limit says so, and `RowRules.choices` has it report the best token with which any of them
goes on. So neither drafting nor the block size decides a name, and no other tool can be named.
"""

from collections.abc import Sequence

Ids = tuple[int, ...]


def split(calls: Sequence[Ids]) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the ids that all of some call beginnings share, and what follows them in each.

    The second part is empty once nothing remains to be chosen: one beginning is left, or one of
    them is complete.
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
    """Return the tokens with which any of these beginnings goes on, in ascending order."""
    return tuple(sorted({ids[0] for ids in calls}))


def following(calls: Sequence[Ids], token: int) -> tuple[Ids, ...]:
    """Return what follows the token in the beginnings that go on with it."""
    return tuple(ids[1:] for ids in calls if ids[0] == token)
