"""Let the target choose the tool of a forced call among the declared ones.

The beginning of a call is known for each declared tool (`OutputVocabulary.calls`). The ids that all
of them share are forced. Where they differ, the device decides one token and stops, by the row's
limit, and `RowRules.choices` makes it report the best token that continues any of them. So the name
depends neither on drafting nor on the block size, and is always a declared one.
"""

from collections.abc import Sequence

from dflash_jax.engine.state_machine.output_vocabulary import Ids


def split_names(calls: Sequence[Ids]) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the ids that all call beginnings share, and the rest of each.

    The rest is empty if nothing remains to be chosen: one beginning is left, or one is complete.
    """
    calls = list(dict.fromkeys(calls))
    if not calls:
        return (), ()
    if len(calls) == 1:
        return calls[0], ()
    shared = 0
    while len({ids[shared : shared + 1] for ids in calls}) == 1 and len(calls[0]) > shared:
        shared += 1
    rest = tuple(ids[shared:] for ids in calls)
    return calls[0][:shared], rest if all(rest) else ()


def calls_after(calls: Sequence[Ids], token: int) -> tuple[Ids, ...]:
    """Return the rest of the beginnings that continue with a token, after it."""
    return tuple(ids[1:] for ids in calls if ids[0] == token)
