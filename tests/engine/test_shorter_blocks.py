"""Blocks shorter than those a drafter was trained on: the same drafts, fewer of them."""

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

pytestmark = pytest.mark.exhaustive

PROMPT, TRAINED = [5, 4, 3, 2, 1], 8


def engine(kind: str, block: int, *, length: int = 64, chunk: int = 16) -> Engine:
    target = tiny_target(num_layers=2)
    both: dict = {"windows": (12, None), "causal": (False, False), "block_size": TRAINED}
    plan = Plan(max_length=length, block=block, chunk=chunk, report_drafts=True)
    return random_engine(target, tiny_drafter(target, kind, **both), plan, seed=3)


def drafts(made: Engine) -> list[tuple[int, ...]]:
    """Return the drafts of each round; of models with random weights none is accepted."""
    trace = made.generate(PROMPT, max_tokens=20, ignore_eos=True, trace=True).trace
    rounds = [x for x in trace if x.proposed]
    assert not any(x.accepted for x in rounds)
    return [x.rejected for x in rounds]


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("block", [3, 5])
def test_a_shorter_block_has_the_first_drafts_of_a_whole_one(kind: str, block: int) -> None:
    whole, short = drafts(engine(kind, TRAINED)), drafts(engine(kind, block))
    assert short == [round_[: block - 1] for round_ in whole]


def test_masks_beyond_the_block_have_slots_at_the_end_of_a_row() -> None:
    """`dynamic_update_slice` would move a write that does not fit over earlier keys."""
    short = engine("dflash", 2, length=19, chunk=2)
    slots = {x.slots for x in short.core.runner.state.drafter}
    assert min(slots) >= 12 + TRAINED
    assert max(slots) >= 19 + TRAINED
    whole = engine("dflash", TRAINED, length=64)
    answers = [
        x.generate(PROMPT, max_tokens=14, ignore_eos=True, trace=True) for x in (short, whole)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    first = [[x.rejected[:1] for x in answer.trace if x.proposed] for answer in answers]
    assert first[0] == first[1]
    assert len(jax.tree.leaves(short.core.runner.state.drafter)) == 4
