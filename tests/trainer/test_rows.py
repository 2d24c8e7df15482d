"""Packing, and batches as a function of the step."""

import numpy as np

from dflash_jax.trainer import rows
from dflash_jax.trainer.recipes import Bucket

BUCKETS = (Bucket(length=8, rows=2), Bucket(length=16, rows=1))


def document(size: int, first: int) -> rows.Document:
    return rows.Document(np.arange(first, first + size, dtype=np.int32), np.ones(size, bool))


def test_documents_stay_whole_and_share_rows():
    packed = rows.pack([document(5, 10), document(12, 30), document(3, 20)], BUCKETS, fill=9)
    assert packed[0].tokens.tolist() == [[10, 11, 12, 13, 14, 20, 21, 22]]
    assert packed[1].tokens[0, :12].tolist() == list(range(30, 42))
    assert packed[1].tokens[0, 12:].tolist() == [9] * 4
    assert packed[1].real.sum() == packed[1].wanted.sum() == 12


def test_a_document_longer_than_every_bucket_is_cut():
    packed = rows.pack([document(40, 0)], BUCKETS, fill=9)
    assert packed[1].tokens.tolist() == [list(range(16))]


def test_one_per_row_gives_each_document_its_row():
    assert len(rows.one_per_row([document(2, 0), document(2, 5)], BUCKETS, fill=9)[0].tokens) == 2


def test_the_rows_that_steps_read_are_known_before_the_first_step():
    packed = tuple(rows.one_per_row([document(8, i) for i in range(7)], BUCKETS, fill=9))
    batches = rows.Batches(BUCKETS, packed, seed=1)
    chosen = [batches.chosen(step)[1].tolist() for step in range(2)]
    assert [x.tolist() for x in batches.read(2)] == [sorted(chosen[0] + chosen[1]), []]
    assert batches.read(60)[0].tolist() == list(range(7))  # no epoch reads all of them


def test_an_epoch_shows_every_full_batch_once_and_a_step_is_always_the_same():
    packed = tuple(rows.one_per_row([document(8, i) for i in range(6)], BUCKETS, fill=9))
    batches = rows.Batches(BUCKETS, packed, seed=1)
    seen = [batches.at(step)[1].tokens[:, 0].tolist() for step in range(3)]
    assert sorted(first for batch in seen for first in batch) == list(range(6))
    assert batches.at(2)[1].tokens[:, 0].tolist() == seen[2]
    assert [batches.at(3 + step)[1].tokens[:, 0].tolist() for step in range(3)] != seen


def test_an_epoch_is_shuffled_once_not_at_every_step():
    class Counted(rows.Batches):
        def plan(self, epoch):
            shuffled.append(epoch)
            return super().plan(epoch)

    shuffled: list[int] = []
    packed = tuple(rows.one_per_row([document(8, i) for i in range(6)], BUCKETS, fill=9))
    batches = Counted(BUCKETS, packed, seed=1)
    seen = [batches.chosen(step)[1].tolist() for step in range(6)]
    assert shuffled == [0, 1]
    assert seen == [rows.Batches(BUCKETS, packed, 1).chosen(step)[1].tolist() for step in range(6)]


def test_rows_survive_saving(tmp_path):
    packed = rows.pack([document(5, 10), document(12, 30)], BUCKETS, fill=9)
    rows.save(tmp_path / "rows.npz", packed)
    for before, after in zip(packed, rows.load(tmp_path / "rows.npz"), strict=True):
        assert np.array_equal(before.tokens, after.tokens)
        assert np.array_equal(before.wanted, after.wanted)
