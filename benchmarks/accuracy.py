"""Error of every mode against float32: logits, greedy tokens, perplexity, and acceptance length.

    python -m benchmarks.accuracy --llama-cpp BUILD [--models tiny,smollm2] [--types q8_0]
        [--json benchmarks/results/accuracy.json]

Texts are held-out programs for the shipped target and English prose for SmolLM2, in windows that
are scored from an empty cache. The reference is our float32 of the F32 file; llama.cpp computes the
same type on the same ids. Acceptance lengths are those of the shipped pair on held-out prompts,
both models in the mode. A mode of the F32 file quantises on loading; "packed" keeps a file's
blocks.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import heldout, heldout_chats
from benchmarks.llama_cpp.settings import (
    DRAFTED,
    LLAMA,
    MODES,
    Setting,
    about,
    case_parser,
    chosen_settings,
    merge,
    tokenizer_of,
)
from benchmarks.llama_cpp.worker import Worker
from benchmarks.paired import markdown
from dflash_jax.importance import chunks_of

WINDOW = 128  # tokens of a window
MOST_WINDOWS = 40  # windows of a model
# Prompts and tokens by which acceptance lengths are measured, and room for both.
PROMPTS = 24
TOKENS = 96
LENGTH = 1024
ENGLISH = Path(__file__).with_name("heldout_english.txt")
FLOAT_MODES = {name: MODES[name] for name in ("bfloat16", "int8", "int4")}
HEADINGS = "model | mode | relative error | KL divergence | same greedy token | perplexity"
REFERENCE = "float32"
STAGE = "accuracy"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "DFLASH_PROGRESS": "off"}


@dataclasses.dataclass(frozen=True)
class Scores:
    """Figures of logits over all positions of some windows, against a reference."""

    max_error: float
    relative_error: float  # root mean square of errors over that of logits
    kl_divergence: float  # mean over positions, from the reference, in nats
    greedy_agreement: float
    perplexity: float  # perplexity of the windows' tokens


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities [..., V] in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def scores(logits: np.ndarray, reference: np.ndarray, windows: np.ndarray) -> Scores:
    """Return the scores of logits [W, T, V] of windows [W, T]."""
    sums = np.zeros(5)
    count = windows.size
    largest = 0.0
    for ours, theirs, ids in zip(logits, reference, windows, strict=True):
        log_p = log_softmax(theirs)
        log_q = log_softmax(ours)
        error = ours.astype(np.float64) - theirs
        largest = max(largest, float(np.abs(error).max()))
        sums += (
            np.square(error).sum(),
            np.square(theirs.astype(np.float64)).sum(),
            (np.exp(log_p) * (log_p - log_q)).sum(),
            (ours.argmax(-1) == theirs.argmax(-1)).sum(),
            -log_q[np.arange(len(ids) - 1), ids[1:]].sum(),
        )
    predicted = count - len(windows)
    return Scores(
        largest,
        float(np.sqrt(sums[0] / sums[1])),
        sums[2] / count,
        sums[3] / count,
        float(np.exp(sums[4] / predicted)),
    )


def windows_of(model: str, target: Path) -> np.ndarray:
    """Return windows of held-out text as ids [W, T], of prose each after the start token."""
    tokenizer = tokenizer_of(target)
    if model != "tiny":
        text = ENGLISH.read_text(encoding="utf-8")
        return np.asarray(chunks_of(tokenizer, text, WINDOW)[:MOST_WINDOWS])
    texts = [row["text"] for row in heldout() if "text" in row]
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text)
    count = min(len(ids) // WINDOW, MOST_WINDOWS)
    return np.asarray(ids[: count * WINDOW]).reshape(count, WINDOW)


def logits_of(worker: Worker, windows: np.ndarray) -> np.ndarray:
    """Return logits [W, T, V] that a worker computes."""
    logits = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "logits")
        for ids in windows:
            worker.ask(f"logits {path} {','.join(map(str, ids))}")
            logits.append(np.fromfile(path, np.float32).reshape(len(ids), -1))
    return np.stack(logits)


def acceptance_length(worker: Worker, prompts: Sequence[Sequence[int]]) -> float:
    """Return the mean number of tokens per round of drafted decoding."""
    words = [",".join(map(str, ids)) for ids in prompts]
    answers = [worker.ask(f"{DRAFTED} {TOKENS} {ids}") for ids in words]
    return sum(len(a["tokens"]) - 1 for a in answers) / sum(a["rounds"] for a in answers)


def modes(settings: Sequence[Setting]) -> Iterator[tuple[str, Callable[[], Worker]]]:
    """Yield the name of each mode and how to start its worker, the reference first."""

    def ours(setting: Setting, plan: dict[str, Any]) -> Callable[[], Worker]:
        drafted = setting.model == "tiny"
        command = setting.ours(plan | {"max_length": LENGTH}, drafted=drafted)
        if not drafted:
            command.append("--no-warm-up")
        return lambda: Worker(command, setting.cores, environment=ENVIRONMENT)

    def theirs(setting: Setting, *, drafted: bool) -> Callable[[], Worker]:
        return lambda: Worker(setting.llama(LENGTH, drafted=drafted), setting.cores)

    base = next((s for s in settings if s.kind == "f32"), None)
    if base is None:
        raise SystemExit("--types has no f32, the type of the reference; add it")
    yield REFERENCE, ours(base, MODES[REFERENCE])
    for name, plan in FLOAT_MODES.items():
        yield name, ours(base, plan)
    for setting in settings:
        if setting.kind not in ("f32", "f16", "bf16"):
            yield f"packed {setting.kind}", ours(setting, {"weights": "packed"})
    for setting in settings:
        yield f"{LLAMA} {setting.kind}", theirs(setting, drafted=False)
        if setting.model == "tiny":
            yield f"{LLAMA} {setting.kind} {DRAFTED}", theirs(setting, drafted=True)


def measure(model: str, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the scores of every mode of a model."""
    windows = windows_of(model, settings[0].target)
    chat = tokenizer_of(settings[0].target).chat
    prompts = heldout_chats(chat, PROMPTS) if model == "tiny" else []
    by_mode: dict[str, Any] = {}
    reference = np.zeros(0)
    for name, start in modes(settings):
        with start() as worker:
            if not name.endswith(DRAFTED):
                logits = logits_of(worker, windows)
                reference = logits if name == REFERENCE else reference
                by_mode[name] = dataclasses.asdict(scores(logits, reference, windows))
            if prompts and (name.endswith(DRAFTED) or not name.startswith(LLAMA)):
                length = acceptance_length(worker, prompts)
                by_mode[name.removesuffix(f" {DRAFTED}")]["acceptance_length"] = length
        print(line(model, name, by_mode[name.removesuffix(f" {DRAFTED}")]), flush=True)
    return {"tokens": windows.size, "modes": by_mode}


def line(model: str, name: str, figures: dict[str, Any]) -> str:
    """Return the figures of one mode as a line of text."""
    shown = [f"{key} {value:.4g}" for key, value in figures.items()]
    return f"{model:10} {name:24} {'  '.join(shown)}"


def table(cases: dict[str, Any]) -> list[str]:
    """Return every mode and llama.cpp's types, by model, in Markdown; τ where it was measured."""
    rows = []
    lengths = []
    for model, case in cases.items():
        for name, figures in case[STAGE]["modes"].items():
            length = figures.get("acceptance_length")
            lengths.append("" if length is None else f"{length:.2f}")
            cells = [
                model,
                name,
                f"{figures['relative_error']:.1e}",
                f"{figures['kl_divergence']:.1e}",
                f"{100 * figures['greedy_agreement']:.1f} %",
                f"{figures['perplexity']:.2f}",
            ]
            rows.append(cells)
    if not any(lengths):
        return markdown(HEADINGS, rows)
    cells = [[*row, length] for row, length in zip(rows, lengths, strict=True)]
    return markdown(f"{HEADINGS} | τ", cells)


def main(words: Sequence[str] | None = None) -> int:
    """Measure every model, printing each mode when it is done."""
    types = "f32,bf16,q8_0,q4_0,q4_1"
    parser = case_parser("accuracy", __doc__, models="tiny,smollm2", types=types, cores="2")
    options: argparse.Namespace = parser.parse_args(words)
    by_model: dict[str, list[Setting]] = {}
    for _, setting in chosen_settings(parser, options):
        by_model.setdefault(setting.model, []).append(setting)
    for model, settings in by_model.items():
        load = os.getloadavg()[0]
        result = measure(model, settings) | {"load": [load, os.getloadavg()[0]]} | about(options)
        del result["rounds"]  # nothing is timed
        print("\n".join(table({model: {STAGE: result}})), flush=True)
        if options.json:
            merge(options.json, model, STAGE, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
