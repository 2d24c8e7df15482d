"""Damages folders of models, prefixes and training states: `python -m tests.soak.mutations`.

    python -m tests.soak.mutations [--count 200] [--seed 0] [--only KIND] [--verbose]

Each kind is damaged `--count` times, a file each time. What is read afterwards either works, with
finite numbers, or is refused by a named error; a saved training state or a prefix must never come
back with other bits. A process of its own reads, with two gigabytes more than it needs: one that
dies, hangs or raises another error is a fault, and the exit code is 1. Twenty minutes on two cores.
"""

import argparse
import collections
import contextlib
import json
import os
import queue
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CONVERTERS = ROOT / "tests" / "converters"
sys.path[:0] = [str(ROOT), str(CONVERTERS)]

from tests import damage  # noqa: E402

HANG_S = 120.0
SPARE = 2 << 30  # bytes of address space that a damaged file may take
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
NEW = 4  # tokens
QUANTISED = {
    "awq": ("awq.llama3", "awq_gemv.qwen3"),
    "gptq": ("gptq.llama3", "gptq_v2.qwen3"),
    "compressed-tensors": ("compressed.llama3", "compressed_order.qwen3"),
}
ADAPTERS = ("all_linear.qwen3", "embedding.qwen3", "patterns.llama3")
Use = Callable[..., Any]  # of a model's folder
Read = Callable[[Path], str]  # returns what came of a damaged folder; raises named errors


def quantised(folder: Path, name: str, use: Use) -> Read:
    """Write a quantised folder; return a function that uses such a folder."""
    from test_hf_grouped import folder as write

    write(name, folder)
    expected = use(folder)
    return lambda damaged: compared(use(damaged), expected)


def adapter(folder: Path, name: str, use: Use) -> Read:
    """Copy an adapter; return a function that uses one and its base model."""
    damage.copy(CONVERTERS / "data" / "adapters" / name, folder)
    (folder / "logits.npy").unlink()
    base = ROOT / "tests" / "oracle" / "targets" / name.split(".")[1]
    expected = use(base, lora=folder)
    return lambda damaged: compared(use(base, lora=damaged), expected)


def decoded(folder: Path, **options: Any) -> list[int]:
    """Return greedy tokens; converts the model, too, which must write all or nothing."""
    from dflash_jax import Plan
    from dflash_jax.converters.convert import convert
    from dflash_jax.converters.models import open_model
    from dflash_jax.errors import DFlashError
    from dflash_jax.loading import open_pair

    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        try:
            convert(open_model(folder, **options), out)
        except DFlashError:
            assert not list(Path(place).iterdir()), "a refused conversion left files"
    plan = Plan(max_length=64, chunk=16, rows=1, dtype="float32")
    engine = open_pair(folder, None, **options).engine(plan)
    return engine.generate(PROMPT, max_tokens=NEW).token_ids


def loaded(folder: Path, **options: Any) -> list[bytes]:
    """Return the weights of a model, which takes no compiling."""
    import jax

    from dflash_jax.converters.models import open_model

    params = open_model(folder, role="target", **options).load("float32")
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]


def compared(found: Any, expected: Any) -> str:
    return "equal" if found == expected else "different"


def prefixes(folder: Path, name: str, use: Use) -> Read:
    """Fill a prefix folder; return a function that decodes with one, which changes no token."""
    import dataclasses

    from dflash_jax import Plan
    from dflash_jax.engine.engine import Engine
    from dflash_jax.graph import Graph
    from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

    target = tiny_target(num_layers=2, vocab_size=251)
    drafter = tiny_drafter(target, target_layer_ids=(0,), num_layers=1, windows=(12,),
                           causal=(False,))  # fmt: skip
    first = random_engine(target, drafter, Plan(rows=1, max_length=64, chunk=4, block=4), seed=1)

    def opened(where: Path) -> list[int]:
        plan = dataclasses.replace(first.plan, prefix_cache=1 << 20, prefix_folder=str(where))
        engine = Engine(Graph(first.graph.pair, plan), first.params)
        engine.core.runner.compiled.executables = first.core.runner.executables
        found = engine.generate(PROMPT, max_tokens=12, temperature=2.0, seed=5).token_ids
        engine.close()
        return found

    expected = opened(folder)

    def read(damaged: Path) -> str:
        assert opened(damaged) == expected, "a damaged prefix changed tokens"
        return "equal"

    return read


def states(folder: Path, name: str, use: Use) -> Read:
    """Save two training states; return a function that restores the newest one."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.trainer import saved

    rng = np.random.default_rng(0)
    kept = {
        step: {"w": jnp.asarray(rng.standard_normal((64, 16)), jnp.float32), "n": jnp.int32(step)}
        for step in (4, 8)
    }
    for step, state in kept.items():
        saved.save(folder, step, state, "a run")
    start = {"w": jnp.zeros((64, 16), jnp.float32), "n": jnp.int32(0)}

    def read(damaged: Path) -> str:
        step, state = saved.newest(damaged, start, "a run")
        assert step in kept, f"training starts again, although a state is intact (step {step})"
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(kept[step]), strict=True):
            assert x.dtype == y.dtype, "a restored array has another dtype"
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), "other bits were restored"
        return "equal" if step == 8 else "the state before it"

    return read


KINDS: dict[str, list[tuple[Callable[[Path, str, Use], Read], str]]] = {
    **{kind: [(quantised, name) for name in names] for kind, names in QUANTISED.items()},
    "lora": [(adapter, name) for name in ADAPTERS],
    "prefix": [(prefixes, "")],
    "training": [(states, "")],
}


class Damaging:
    """Folders of one kind, to damage and read again.

    Args:
      use: what is done with models.
    """

    def __init__(self, kind: str, folder: Path, use: Use = decoded):
        self._place, self._made = folder / "damaged", []
        for i, (make, name) in enumerate(KINDS[kind]):
            whole = folder / f"whole{i}"
            whole.mkdir()
            read = make(whole, name, use)
            outcome = read(damage.copy(whole, self._place))
            assert outcome == "equal", f"{kind} {name} is {outcome} without damage"
            self._made.append((whole, read))

    def try_one(self, seed: int) -> dict[str, Any]:
        """Damage a copy by a seed, and return what reading it does."""
        from dflash_jax.errors import DFlashError

        rng = random.Random(seed)
        whole, read = rng.choice(self._made)
        what = damage.damage_folder(rng, damage.copy(whole, self._place))
        began, error = time.monotonic(), ""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                outcome = read(self._place)
            except DFlashError as found:
                outcome, error = type(found).__name__, str(found)
            except Exception as found:
                outcome, error = f"FAULT {type(found).__name__}", traceback.format_exc()
        seconds = time.monotonic() - began
        return {"what": what, "outcome": outcome, "error": error, "seconds": seconds}


def child(kind: str, folder: Path) -> None:
    """Read seeds from standard input, and print what each did."""
    damaging = Damaging(kind, folder)
    damaging.try_one(0)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE, resource.RLIM_INFINITY))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(damaging.try_one(int(line))), flush=True)


class Child:
    """A process that damages and reads."""

    def __init__(self, kind: str):
        self._folder = tempfile.TemporaryDirectory()
        words = [sys.executable, "-m", "tests.soak.mutations", "--child", self._folder.name]
        self._process = subprocess.Popen(
            [*words, "--only", kind],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        if self._line(600.0) != "ready\n":
            self.close()
            raise RuntimeError(f"whole folders of {kind} cannot be read")

    def try_one(self, seed: int) -> dict[str, Any] | None:
        """Return what a seed did; None if the process died, or hung and was killed."""
        assert self._process.stdin
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        line = self._line(HANG_S)
        return json.loads(line) if line else None

    def close(self) -> int:
        """End the process; return its exit code."""
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
        return -9 if code is None else code

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def _line(self, seconds: float) -> str:
        with contextlib.suppress(queue.Empty):
            return self._lines.get(timeout=seconds)
        return ""


def outcomes(kind: str, seeds: range) -> Iterator[dict[str, Any]]:
    """Yield what each seed did."""
    process = Child(kind)
    try:
        for seed in seeds:
            found = process.try_one(seed)
            if found is None:
                code = process.close()
                how = f"died by signal {-code}" if code != -9 else "hung, or was killed"
                found = {"what": "?", "outcome": f"FAULT {how}", "error": how, "seconds": HANG_S}
                process = Child(kind)
            yield found | {"seed": seed}
    finally:
        process.close()


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description="Damage folders, and read them.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.only, options.child)
        return 0
    faults = 0
    for kind in [options.only] if options.only else KINDS:
        counted: collections.Counter[str] = collections.Counter()
        slowest = 0.0
        for found in outcomes(kind, range(options.seed, options.seed + options.count)):
            counted[found["outcome"]] += 1
            slowest = max(slowest, found["seconds"])
            fault = found["outcome"].startswith("FAULT")
            faults += fault
            if fault or options.verbose:
                last = found["error"] if fault else found["error"][:160]
                start = f"{kind} seed {found['seed']} ({found['what']}), {found['seconds']:.1f} s"
                print(f"{start}: {found['outcome']} {last}")
        listed = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
        print(f"{kind:20} {options.count}: {listed}; slowest {slowest:.1f} s", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sys.exit(main())
