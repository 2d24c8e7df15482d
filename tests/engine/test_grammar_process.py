"""Grammars that would crash or block the process are refused, and affect no other request."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_jax.engine.structured import grammars as structured
from dflash_jax.engine.structured import process as grammar_process
from dflash_jax.engine.structured import trial_process
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.engine.structured.refusals import alone
from dflash_jax.errors import RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils import limited_process

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

ENDLESS = {"json": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}


def grammars(seconds: float = 30.0) -> Grammars:
    made = Grammars(Tokenizer.from_directory(locate("tiny", "target")), 2048, [2040])
    made.seconds = seconds
    return made


def referring(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{count}": {"type": "integer"}}}


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


def deep(count: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(count):
        value = [value]
    return value


def chain(count: int, letter: str) -> str:
    lines = [f"{letter}{i}: {letter}{i + 1}" for i in range(count)]
    return "\n".join([f"start: {letter}0", *lines, f'{letter}{count}: "x"'])


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": referring(3000)}, r"the process that tried to ended \(SIG[A-Z]+\), by its depth"),
        ({"json": nested(300)}, "not supported at #: it is nested too deeply; move inner schemas"),
        ({"json": nested(2000)}, "the JSON schema is nested too deeply; move inner schemas"),
        ({"json": {"const": deep(400)}}, "it is nested too deeply"),
        ({"json": {"const": deep(5000)}}, "is nested too deeply"),
        ({"json": '{"items":' * 9000 + "1" + "}" * 9000}, "is nested too deeply"),
        (
            {"grammar": f"start: %json {json.dumps(nested(300))}"},
            "the grammar is not understood",
        ),
        ({"grammar": chain(5000, "r")}, r"the process that tried to ended \(SIG[A-Z]+\)"),
        (
            {"json": {"type": "integer", "multipleOf": 1000003}},
            "has multipleOf 1000003 at #",
        ),
        (
            {"json": {"type": "number", "multipleOf": 9999.1}},
            "has multipleOf 9999.1 at #",
        ),
        ({"regex": "\ud800"}, "the structure is not understood: .* surrogates not allowed"),
    ],
)
def test_hostile_structures_are_refused(structure: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        grammars().make(structure)


def test_schemas_and_grammars_at_the_bounds_are_compiled() -> None:
    made = grammars()
    flat = "\n".join(["start: r0", *(f'r{i}: "x{i}"' for i in range(900))])
    endless: dict[str, Any] = {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}
    for good in (referring(99), nested(90), {"$ref": "#/$defs/a", "$defs": endless}):
        made.make({"json": good})
    made.make({"grammar": flat})
    made.make({"json": {"type": "integer", "multipleOf": 1_000_000}})


def test_a_structure_that_was_seen_before_is_not_tried_or_explained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = grammars()
    good = {"json": {"properties": {"a": {"type": "integer"}}}}
    bad = {"json": {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}}
    assert not made.knows(good)
    made.make(good)
    with pytest.raises(RequestError, match="#/properties/a: its pattern looks ahead") as first:
        made.make(bad)
    monkeypatch.delattr(grammar_process.GrammarProcess, "attempt")
    assert made.knows(good)
    assert made.knows(bad)
    made.make(good)
    with pytest.raises(RequestError) as again:
        made.make(bad)
    assert str(again.value) == str(first.value)
    made.close()


def test_what_takes_an_explanation_is_no_quick_structure() -> None:
    made = grammars()
    large = {f"p{i}": {"type": "integer"} for i in range(3000)}
    assert not made.decide({"json": {"type": "object", "properties": large}})
    assert made.decide({"regex": "("})
    with pytest.raises(RequestError, match="at #: it has too many different names and texts"):
        made.make({"json": {"type": "object", "properties": large}})
    made.close()


def test_a_part_is_tried_without_the_rest_of_its_schema() -> None:
    definitions = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"type": "null"}, "c": {}}
    part = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}
    schema = {"properties": {"x": part, "y": {}}, "$defs": definitions}
    assert alone(schema, {"type": "string"}, "#/properties/y") == {"type": "string"}
    needed = {name: definitions[name] for name in "ab"}
    assert alone(schema, part, "#/properties/x") == {**part, "$defs": needed}
    whole = alone(schema, {"$ref": "#/properties/x"}, "#/properties/z")
    assert whole["$ref"].endswith("/properties/z")


def test_a_list_of_choices_may_have_thousands_of_texts() -> None:
    made = grammars()
    tokenizer = made._tokenizer
    assert tokenizer is not None
    texts = [f"option {i}" for i in range(8000)]
    cases = [(texts, "option 7999", True), (texts, "option 8000", False), (["a", ""], "", True)]
    cases += [(["a", "ab"], text, fits) for text, fits in (("a", True), ("ab", True), ("", False))]
    cases += [([""], "", True), (['"\\n|é ', "x"], '"\\n|é ', True)]
    for choices, text, fits in cases:
        grammar = made.make({"choice": choices})
        mask = np.zeros((1, 2048 // 32), np.uint32)
        for token in tokenizer.encode(text, specials=False):
            grammar.fill(mask, [])
            grammar.accept([token])
        if not grammar.finished:
            grammar.accept([2040])
        assert (grammar.error is None) == fits, (choices[-1], text)
    made.close()


def test_a_grammar_that_ends_its_process_is_refused_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, hostile = grammars(), {"grammar": chain(990, "r")}
    made.make({"regex": "a+"})
    started: list[Any] = []
    start = grammar_process.GrammarProcess._start
    monkeypatch.setattr(
        grammar_process.GrammarProcess, "_start", lambda self: (started.append(1), start(self))
    )
    for _ in range(2):  # the second time by the remembered verdict
        with pytest.raises(RequestError, match=r"process that tried to ended \(SIG[A-Z]+\)"):
            made.make(hostile)
        assert len(started) == 1
    made.make({"regex": "b+"})
    assert len(started) == 2


def test_a_grammar_that_takes_too_long_is_refused_and_never_compiled_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = grammars(seconds=1.0)
    made.make({"regex": "a+"})
    here: list[str] = []
    compiled = structured.compiled
    monkeypatch.setattr(
        structured,
        "compiled",
        lambda view, source: (here.append(source), compiled(view, source))[1],
    )
    for _ in range(2):
        with pytest.raises(RequestError, match="took longer than 1 s to compile; simplify it"):
            made.make(ENDLESS)
    assert not here
    made.make({"regex": "b+"})
    assert len(here) == 1


def test_a_killed_grammar_process_costs_no_request() -> None:
    made = grammars()
    made.make({"regex": "a+"})
    assert made._shared is not None
    process = made._shared[1]._short
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    made.make({"regex": "b+"})
    made.close()
    assert process._process is None
    made.make({"regex": "c+"})
    made.close()


@pytest.mark.exhaustive
def test_a_short_trial_decides_quick_grammars_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_process, "SHORT", 0.5)
    made = grammars(seconds=1.0)
    hostile = [{"json": nested(2000)}, {"grammar": chain(990, "r")}, {"regex": "("}]
    for quick in [{"regex": "a+"}, *hostile]:
        assert made.decide(quick)
    assert made._shared is not None
    trials = made._shared[1]
    made.make({"regex": "a+"})
    for structure in hostile:
        with pytest.raises(RequestError):
            made.make(structure)
    assert trials._long._process is None  # all verdicts were known
    assert not made.decide(ENDLESS)
    with pytest.raises(RequestError, match="took longer than 1 s"):
        made.make(ENDLESS)
    assert made.decide(ENDLESS)
    made.close()


def test_a_quick_grammar_does_not_wait_for_a_slow_one() -> None:
    made = grammars(seconds=300.0)
    made.make({"regex": "a+"})
    assert made._shared is not None
    trials = made._shared[1]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(made.make, ENDLESS)
        while not trials._slow and not slow.done():
            time.sleep(0.01)
        made.make({"regex": "b+"})
        assert not slow.done()
        made.close()
        with pytest.raises(RequestError):
            slow.result()
    assert made.knows({"regex": "b+"})
    made.close()


def test_the_lock_of_a_process_is_given_to_the_first_and_the_last_by_turns() -> None:
    lock = limited_process.FairLock()
    order: list[int] = []

    def work(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._waiting) < count:
                time.sleep(0.001)
        assert not lock.acquire(blocking=False)
    for thread in threads:
        thread.join()
    assert order == [0, 7, 1, 6, 2, 5, 3, 4]
    assert lock.acquire(blocking=False)


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    import llguidance

    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    text, memory = tokenizer.core.to_str(), 64 * 2**20
    trials = grammar_process.GrammarTrials(text, 2048, [2040], memory)
    schema = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(ENDLESS["json"]))
    with pytest.raises(RequestError, match=r"ended \(SIGABRT\), by .* more than 64 MiB of memory"):
        trials.check(schema, 300.0)
    trials.close()


PARENT = """
import json, sys, threading
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils import limited_process

made = Grammars(Tokenizer.from_directory(locate("tiny", "target")), 2048, [2040])
made.make({"regex": "a+"})
threading.Thread(target=made.make, args=(json.loads(sys.argv[1]),)).start()
print(made._shared[1]._short._process.pid, flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_does_not_outlive_the_one_that_started_it() -> None:
    command = [sys.executable, "-c", PARENT, json.dumps(ENDLESS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        parent.kill()
    stat, end = Path(f"/proc/{number}/stat"), time.monotonic() + 10
    while (alive := _runs(stat)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive


def _runs(stat: Path) -> bool:
    """Return whether a process runs, by its file in /proc."""
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_process_ends_with_its_input_in_the_middle_of_a_grammar() -> None:
    """As if its parent was killed; and it never imports jax."""
    import llguidance

    worker = limited_process.__file__
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    setup = {
        "module": trial_process.__file__,
        "setup": {"tokenizer": tokenizer.core.to_str(), "vocab": 2048, "eos": [2040]},
        "path": [],
        "memory": 2**29,
        "stack": trial_process.STACK,
        "niceness": 5,
    }
    schema = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(ENDLESS["json"]))
    text = json.dumps(setup) + "\n" + json.dumps(schema) + "\n"
    command = [sys.executable, "-X", "importtime", "-P", worker]
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "null\n")
    assert "llguidance" in done.stderr
    assert "jax" not in done.stderr
