"""Prompts of the benchmark of drafts from the text; times are not checked."""

from benchmarks.copies import PROMPTS, batches


def test_rows_of_a_batch_have_prompts_of_all_kinds() -> None:
    alone = batches(1)
    assert {kind: [prompt for [prompt] in parts] for kind, parts in alone.items()} == {
        kind: [*prompts] for kind, prompts in PROMPTS.items()
    }
    [[kind, [mixed]]] = batches(8).items()
    assert (kind, len(mixed)) == ("mixed", 8)
    for prompts in PROMPTS.values():
        assert {*prompts} & {*mixed}
