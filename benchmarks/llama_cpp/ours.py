"""Our engine as a worker: it loads models once and answers requests.

    python -m benchmarks.llama_cpp.ours TARGET [--drafter DRAFTER [--forced]] [--plan JSON]

Requests and replies are those of llama_worker.cpp; the first line also has the plan.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.modes import generate
from dflash_jax import loading
from dflash_jax.plan import Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import force_acceptance, scripted_engine, set_script
from dflash_jax.utils.allocator import tune_allocator


class JaxWorker:
    """An engine and the requests it answers."""

    def __init__(self, options: argparse.Namespace):
        self._truth: dict[tuple[int, ...], list[int]] = {}
        self.forced = options.forced
        tune_allocator()  # as the command line does
        loading.use_compilation_cache()
        with warnings.catch_warnings(action="ignore"):  # numbered vocabularies have no words
            pair = loading.open_pair(options.target, options.drafter)
        self.engine = pair.engine(Plan(**json.loads(options.plan)))
        if options.forced:
            self.engine = scripted_engine(self.engine)
        if options.warm_up:
            self.engine.warm_up("greedy", "chunks")

    def describe(self) -> dict[str, Any]:
        """Return the first line."""
        plan = self.engine.plan.to_json()
        shown = {k: v for k, v in plan.items() if k != "stored"}
        return {"ready": True, "plan": shown, "forms": self.engine.graph.explain().forms}

    def answer(self, line: str) -> dict[str, Any]:
        """Answer one request."""
        mode, first, ids, *accepted = line.split()
        prompt = [int(i) for i in ids.split(",")]
        if mode == "logits":
            return self._logits(Path(first), prompt)
        max_tokens = int(first)
        drafted = mode == "drafted"
        if drafted and self.forced:
            self._force(prompt, max_tokens, [int(n) for n in accepted[0].split(",")])
        run = generate(
            self.engine,
            prompt,
            max_tokens=max_tokens,
            ignore_eos=bool(accepted),
            speculative=drafted,
        )
        rounds = len(run.acceptance_lengths) if drafted else len(run.token_ids) - 1
        return {
            "prefill_s": run.prefill_s,
            "decode_s": run.decode_s,
            "decode_cpu_s": run.decode_cpu_s,
            "rounds": rounds,
            "tokens": run.token_ids,
        }

    def _force(self, prompt: list[int], max_tokens: int, accepted: list[int]) -> None:
        """Script the drafter such that round i accepts `accepted[i]` drafts."""
        key = (max_tokens, *prompt)
        if key not in self._truth:
            plain = self.engine.generate(
                prompt, max_tokens=max_tokens, ignore_eos=True, speculative=False
            )
            self._truth[key] = [*prompt, *plain.token_ids]
        truth = self._truth[key]
        size = self.engine.graph.config.vocab_size
        set_script(self.engine, force_acceptance(truth, len(prompt), accepted, size))

    def _logits(self, path: Path, ids: list[int]) -> dict[str, Any]:
        engine = self.engine
        model = TargetModel(engine.graph.config, engine.params["target"], engine.plan.dtype)
        logits = np.asarray(model.forward([ids]).logits[0], np.float32)
        logits.tofile(path)
        return {"rows": len(logits)}


def main() -> None:
    """Load the models and answer until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--plan", default="{}", metavar="JSON")
    parser.add_argument("--forced", action="store_true", help="replace drafts as requests say")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    worker = JaxWorker(parser.parse_args())
    print(json.dumps(worker.describe()), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(line)), flush=True)


if __name__ == "__main__":
    main()
