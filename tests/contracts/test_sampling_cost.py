"""Steps draw, filter and report log-probabilities only where a request asks for it."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.compiler import compile_programs, declare, resolve
from dflash_jax.compiler.programs import ALL_LANES, MASKED, SAMPLED, SHAPED
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.testing import AMPLE, tiny_drafter, tiny_target

VOCAB = 977
TARGET = tiny_target(num_layers=2, vocab_size=VOCAB)
DRAFTERS = {
    "v1": tiny_drafter(TARGET, num_layers=1, windows=(None,), causal=(False,)),
    "dflash2": tiny_drafter(TARGET, "dflash2"),
    "dspark": tiny_drafter(TARGET, "dspark"),
}
OPTIONAL = {"random_bits", "threefry2x32", "top_k", "sort", "random_seed"}


def programs_of(drafter: DrafterConfig, target: TargetConfig = TARGET) -> dict[str, Any]:
    made = Plan(rows=2, max_length=64, block=4, chunk=8, dtype="float32")
    plan = resolve(made, target, drafter, platform="cpu", memory=AMPLE)
    return declare(plan, target, drafter, lanes=ALL_LANES)


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


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_rows_draw_filter_and_report_nothing_in_any_program(kind: str) -> None:
    programs = programs_of(DRAFTERS[kind])
    free = {  # the tokens a DFlash 2 selector chooses from are its own affair
        name: {"top_k"} if kind == "dflash2" and name.startswith(("spec", "draft")) else set()
        for name in programs
    }
    for name, program in programs.items():
        if name == "score":
            continue  # which reports, and is only run for who asks
        jaxpr = jax.make_jaxpr(program.function)(*program.arguments)
        assert not set(unconditional(jaxpr.jaxpr)) & OPTIONAL - free[name], name


@pytest.mark.parametrize("lane", [SAMPLED, SHAPED, MASKED])
def test_no_program_sorts_the_vocabulary(lane: str) -> None:
    programs = programs_of(DRAFTERS["v1"])
    step = programs["speculative" + lane] if lane != MASKED else programs["verify" + lane]
    (built,) = compile_programs([step]).values()
    text = built.compiled.as_text()
    sorts = re.findall(r"= (\(?\w+\[[\d,]*\]).* sort\(", text)
    assert not [shape for shape in sorts if str(VOCAB) in shape], sorts
