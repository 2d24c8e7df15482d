"""Steps draw, filter and report log-probabilities only where a request asks for it."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.graph.build import compile_programs
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.programs import declare
from dflash_jax.graph.resolve import resolve
from dflash_jax.networks import build_pair
from dflash_jax.testing import AMPLE, planned, tiny_drafter, tiny_target

VOCAB = 977
TARGET = tiny_target(num_layers=2, vocab_size=VOCAB)
DRAFTERS = {
    "v1": tiny_drafter(TARGET, num_layers=1, windows=(None,), causal=(False,)),
    "dflash2": tiny_drafter(TARGET, "dflash2"),
    "dspark": tiny_drafter(TARGET, "dspark"),
}
OPTIONAL = {"random_bits", "threefry2x32", "top_k", "sort", "random_seed"}


def programs_of(
    drafter: DrafterConfig, target: TargetConfig = TARGET, kernels: str = "xla"
) -> dict[ProgramKey, Any]:
    made = Plan(rows=2, max_length=64, block=4, chunk=8, dtype="float32", kernels=kernels)
    plan = resolve(made, build_pair(target, drafter), platform="cpu", memory=AMPLE)
    return declare(planned(target, drafter, plan))


def unconditional(jaxpr: Any) -> Iterator[str]:
    """Names of the primitives that run whatever the requests ask for."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name == "cond":
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from unconditional(inner)


@pytest.mark.sample("native-dspark")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("kernels", ["xla", "native"])
def test_greedy_rows_draw_filter_and_report_nothing_in_any_program(kind: str, kernels: str) -> None:
    """By native kernels, the programs of sampled rows are those of greedy ones."""
    programs = programs_of(DRAFTERS[kind], kernels=kernels)
    drafting = (Step.SPECULATIVE, Step.DRAFT)
    free = {  # the selector of DFlash 2 chooses among the best tokens, in the order of their ids
        key: {"top_k", "sort"} if kind == "dflash2" and key.step in drafting else set()
        for key in programs
    }
    for key, program in programs.items():
        if key.step == Step.PROMPT_LOGPROBS:
            continue  # it reports, and runs only for requests that ask for it
        jaxpr = jax.make_jaxpr(program.function)(*program.arguments)
        assert not set(unconditional(jaxpr.jaxpr)) & OPTIONAL - free[key], key


@pytest.mark.sample("v1-constrained")
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("v1", Variant.SAMPLED),
        ("v1", Variant.PENALIZED),
        ("v1", Variant.CONSTRAINED),
        ("dflash2", Variant.GREEDY),
    ],
)
def test_no_program_sorts_the_vocabulary(kind: str, variant: Variant) -> None:
    programs = programs_of(DRAFTERS[kind])
    step = Step.VERIFY if variant == Variant.CONSTRAINED else Step.SPECULATIVE
    (built,) = compile_programs([programs[ProgramKey(step, variant)]]).values()
    text = built.compiled.as_text()
    sorts = re.findall(r"= (\(?\w+\[[\d,]*\]).* sort\(", text)
    assert not [shape for shape in sorts if str(VOCAB) in shape], sorts
