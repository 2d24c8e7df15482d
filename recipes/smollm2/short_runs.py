"""Short runs: changes of the recipe, each compared with a control by the same prompts.

Every run goes on from one drafter for as many steps on the rows of some shipped rounds, at a third
of the preset's rate, and decodes the same prompts; `control` changes nothing else. A folder holds

    data-N/      turns, answers and rows of round N, from its archive
    features/    the target's hidden states of the rows, which all runs read in the same order
    cases/       the prompts: turns that nobody tuned to, and the last round's held-out turns
    NAME/        a run: state until it is trained, log.jsonl, drafter, decoded.jsonl
    table.json   the figures of all runs whose prompts are answered, over those of `control`

Each is made once, so that a killed command goes on when it is started again. If a run keeps an
average of its weights, the average is another drafter, measured in the folder NAME-averaged.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dflash_jax as dj
from benchmarks.acceptance import conversations
from benchmarks.environment import environment
from benchmarks.paired import markdown
from dflash_jax.errors import ConfigError
from dflash_jax.trainer import setup, training
from dflash_jax.trainer.evaluate import prompt_ids
from dflash_jax.trainer.files import claim, differences, remove, saved_as, sound, write_json
from dflash_jax.trainer.loop import append_lines, cut_log
from dflash_jax.trainer.recipes import Recipe, new_drafter
from dflash_jax.trainer.rows import TokenRows, load
from dflash_jax.trainer.trained import write_drafter

Report = Callable[[str], None]
DECODED = "decoded.jsonl"  # the answers of a run, in the order of the prompts
CONTROL = "control"
START = "start"
AVERAGED = "averaged"
UNSHIFTED = ("confidence_head=false", "rank=32", "sample_from_anchor=false")
# The runs, each with its settings that differ from the control's.
SHORT: dict[str, tuple[str, ...]] = {
    CONTROL: (),
    "chained": ("chained=0.7", "average=0.995"),
    "dflash2": ("kind=dflash2", "rank=32"),
    "dflash2-wide": ("kind=dflash2", "rank=256"),
    "dspark": ("kind=dspark", *UNSHIFTED),
    "dspark-gated": ("kind=dspark", *UNSHIFTED, "markov_head=gated"),
    "dspark-frozen": ("kind=dspark", *UNSHIFTED, "frozen_backbone=true", "rate=3.3e-3"),
    "domino": ("kind=domino", *UNSHIFTED),
    "auf": ("weights=auf",),
    "vat": ("weights=vat", "decay=7"),
    "kl": ("loss=kl",),
}
COMMON = ("steps=350", "rate=3.3e-4", "save_every=10")
UNSEEN, HELD_OUT = SETS = ("unseen", "held out")
MAX_TOKENS = 128
MAX_LENGTH = 1024
WINDOW = 256  # positions that the drafter sees, as the shipped one
TOGETHER = 8  # prompts that are answered at a time
GROUP = 60  # prompts whose answers are saved together
RESAMPLES = 4000  # times that prompts are drawn again


def settings(name: str) -> tuple[str, ...]:
    """Return the settings of a run that differ from the preset's; start is not trained."""
    return (*COMMON, *SHORT.get(name, ()))


@dataclasses.dataclass(frozen=True)
class ShortRuns:
    """A folder of short runs.

    Attributes:
      target: a source that `dflash_jax.load_target` opens.
      start: folder of the drafter that all runs go on from.
      rounds: the recipe of the data in each folder data-N, where N is its seed.
      count: conversations of each category.
      every: distance of the rows that are trained on; 1 for all.
    """

    folder: Path
    target: str
    start: Path
    rounds: tuple[Recipe, ...]
    count: int
    report: Report
    every: int = 1

    def data(self, of: Recipe) -> Path:
        """Return the folder of a round's data."""
        return data_folder(self.folder, of)

    def rows(self) -> list[TokenRows]:
        """Return the rows of all rounds, by bucket."""
        rounds = [load(self.data(of) / setup.ROWS) for of in self.rounds]
        return [joined(parts, self.every) for parts in zip(*rounds, strict=True)]

    def train(self, out: Path, chosen: Recipe) -> None:
        """Train a drafter, or go on with it, unless it is finished."""
        if (out / "drafter").is_dir():
            return
        model = setup.open_target(self.target, chosen)
        mask = self.mask_id()
        params = setup.read_start(self.start, new_drafter(chosen, model.config, mask))
        rows = self.rows()
        about = {
            "target": self.target,
            "start": setup.weights_digest(params),
            "rows": [len(part.tokens) for part in rows],
            "recipe": chosen.settings,
        }
        claim(out, setup.RUN, about)
        identity = json.dumps(about, sort_keys=True)
        chosen = dataclasses.replace(chosen, features=str(self.folder.absolute() / setup.FEATURES))
        fitted = training.fit(
            model, chosen, mask, rows, out, identity=identity, report=self.report, start=params
        )
        if fitted.average is not None:
            write_drafter(out / AVERAGED, fitted.config, fitted.average)
        write_drafter(out / "drafter", fitted.config, fitted.last)
        remove(out / "state")

    def measure(self, name: str, chosen: Recipe, cases: Sequence[dict[str, Any]]) -> None:
        """Train the drafter of a run, unless it is the first one, and answer the prompts."""
        out = self.folder / name
        if name == START:
            self.answer(out, self.start, chosen, cases)
            return
        self.train(out, chosen)
        self.answer(out, out / "drafter", chosen, cases)
        if (out / AVERAGED).is_dir():
            self.answer(self.folder / f"{name}-{AVERAGED}", out / AVERAGED, chosen, cases)

    def mask_id(self) -> int:
        """Return the mask token of the drafter that all runs go on from."""
        from dflash_jax.converters.models import open_model
        from dflash_jax.loading import expect

        config = open_model(self.start, role="drafter").config
        return expect(dj.DrafterConfig, config).mask_token_id

    def cases(self, source: Callable[[Recipe], Any]) -> list[dict[str, Any]]:
        """Return the prompts, making them on the first call.

        Args:
          source: returns the data of a round, by its recipe.

        Raises:
          ConfigError: they were made for another target, other rounds or another count.
        """
        path = self.folder / "cases" / "cases.json"
        seeds = [of.seed for of in self.rounds]
        about = {"target": self.target, "rounds": seeds, "count": self.count}
        if not path.is_file():
            chosen = self.rounds[-1]
            begun = setup.begin(
                self.target,
                source(chosen),
                path.parent,
                chosen,
                report=self.report,
                data_of=self.data(chosen),
            )
            asked, _ = begun.held_out()
            engine = dj.load(self.target, None, plan=self.plan(chosen, block=0))
            cases = [
                {"set": UNSEEN, "category": case.category, "ids": case.prompt}
                for case in conversations(engine, self.count, MAX_TOKENS)
            ]
            cases += [
                {"set": HELD_OUT, "category": entry["kind"], "ids": prompt_ids(engine, entry)}
                for entry in asked
            ]
            room = MAX_LENGTH - MAX_TOKENS
            short = [case for case in cases if len(case["ids"]) <= room]
            with saved_as(path) as partial:
                write_json(partial, {"about": about, "cases": short})
        with sound(path):
            stored = json.loads(path.read_text(encoding="utf-8"))
            changed = differences(stored["about"], about)
            cases = stored["cases"]
        if changed:
            raise ConfigError(
                f"{path} was made with other settings ({'; '.join(changed)}); give the same again,"
                " or another folder"
            )
        return cases

    def plan(self, chosen: Recipe, block: int) -> dj.Plan:
        """Return the plan by which prompts are answered, many at a time."""
        return dj.Plan(
            rows=TOGETHER,
            weights=chosen.target_weights,
            block=block,
            max_length=MAX_LENGTH,
            draft_window=WINDOW if block else 0,
        )

    def answer(
        self, out: Path, drafter: Path, chosen: Recipe, cases: Sequence[dict[str, Any]]
    ) -> None:
        """Answer the prompts that the file of answers does not have yet, a group at a time."""
        path = out / DECODED
        out.mkdir(parents=True, exist_ok=True)
        done = len(read_lines(path))
        if done < len(cases):
            done -= done % GROUP
        cut_log(path, done)
        if done == len(cases):
            return
        engine = dj.load(self.target, drafter, plan=self.plan(chosen, block=chosen.block))
        engine.measures_drafting = False  # it drafts a whole block in every round
        for start in range(done, len(cases), GROUP):
            asked = [case["ids"] for case in cases[start : start + GROUP]]
            lines = []
            for result in engine.generate_many(asked, max_tokens=MAX_TOKENS):
                rounds = list(result.stats.acceptance_lengths)
                lines.append(json.dumps({"tokens": list(result.token_ids), "rounds": rounds}))
            append_lines(path, lines)
            self.report(f"{out.name}: {start + len(asked)} of {len(cases)} prompts answered")

    def table(self, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the figures of all runs whose prompts are answered, the control first."""
        files = self.folder.glob(f"*/{DECODED}")
        answers = {path.parent.name: read_lines(path) for path in files}
        complete = {name: lines for name, lines in answers.items() if len(lines) == len(cases)}
        control = complete.get(CONTROL)
        order = sorted(complete, key=lambda name: (name != CONTROL, name))
        runs = {}
        for name in order:
            runs[name] = self.trained(name)
            for kind in SETS:
                base = None
                if control is not None and name != CONTROL:
                    base = of_set(control, cases, kind)
                runs[name][kind] = compared(of_set(complete[name], cases, kind), base)
        return {"environment": environment(), "runs": runs}

    def trained(self, name: str) -> dict[str, Any]:
        """Return the figures of a run's log; the drafter that runs start from has no log."""
        run = name.removesuffix(f"-{AVERAGED}")
        log = read_lines(self.folder / run / "log.jsonl")
        last = log[-max(1, len(log) // 10) :]
        row: dict[str, Any] = {"settings": SHORT.get(run, ()), "steps": len(log)}
        if log:
            row["hours"] = round(sum(line["seconds"] for line in log) / 3600, 2)
        for metric in ("simulated", "simulated_chained"):
            if log and metric in log[0]:
                row[metric] = round(float(np.mean([line[metric] for line in last])), 3)
        return row


def data_folder(folder: Path, of: Recipe) -> Path:
    """Return where the data of a round are in a folder of short runs."""
    return folder / f"data-{of.seed}"


def joined(parts: Sequence[TokenRows], every: int = 1) -> TokenRows:
    """Return the rows of several parts of one length.

    Args:
      every: distance of the rows that are taken.
    """
    names = [field.name for field in dataclasses.fields(TokenRows)]
    whole = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
    return TokenRows(*(array[::every] for array in whole))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file; none if there is no file."""
    if not path.is_file():
        return []
    with sound(path):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def of_set(
    answers: Sequence[dict[str, Any]], cases: Sequence[dict[str, Any]], kind: str
) -> list[dict[str, Any]]:
    """Return the answers to one set of prompts."""
    return [answer for answer, case in zip(answers, cases, strict=True) if case["set"] == kind]


def compared(
    answers: Sequence[dict[str, Any]], control: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return acceptance length and accepted places, and how they differ from the control's.

    Args:
      control: answers to the same prompts, in the same order.
    """
    lengths: list[int] = []  # tokens that each round committed
    for answer in answers:
        lengths += answer["rounds"]
    accepted = []
    for place in range(1, max(lengths, default=1)):
        share = np.mean([length > place for length in lengths])
        accepted.append(round(float(share), 3))
    row: dict[str, Any] = {
        "answers": len(answers),
        "rounds": len(lengths),
        "acceptance_length": round(float(np.mean(lengths)), 3),
        "accepted_per_position": accepted,
    }
    if control is not None:
        pairs = zip(answers, control, strict=True)
        equal = [answer for answer, other in pairs if answer["tokens"] == other["tokens"]]
        row["equal_answers"] = len(equal)
        for name, value in MEASURES.items():
            row[f"{name}_over_control"] = gain(answers, control, value)
    return row


MEASURES: dict[str, Callable[[int], float]] = {
    "acceptance_length": float,
    "first_place": lambda length: float(length > 1),
}


def gain(
    answers: Sequence[dict[str, Any]],
    control: Sequence[dict[str, Any]],
    value: Callable[[int], float],
) -> dict[str, float]:
    """Return the difference of two means over rounds, with its error over prompts.

    Prompts are drawn again with replacement, the same ones of both (paired bootstrap).

    Args:
      value: returns the value of a round by the number of its tokens.
    """
    count = len(answers)
    drawn = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=RESAMPLES)

    def mean(run: Sequence[dict[str, Any]], times: np.ndarray) -> np.ndarray:
        """Return the mean over the rounds of a run whose prompts count so many times."""
        sums = np.asarray([sum(map(value, answer["rounds"])) for answer in run])
        sizes = np.asarray([len(answer["rounds"]) for answer in run])
        return (times @ sums) / np.maximum(times @ sizes, 1)

    once = np.ones(count)
    gains = mean(answers, drawn) - mean(control, drawn)
    low, high = np.quantile(gains, [0.025, 0.975])
    figures = {
        "gain": mean(answers, once) - mean(control, once),
        "error": gains.std(),
        "low": low,
        "high": high,
    }
    return {name: round(float(number), 4) for name, number in figures.items()}


def lines(table: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table for people."""
    rows = []
    for name, run in table["runs"].items():
        for kind in SETS:
            figures = run[kind]
            gains = []
            for measure in MEASURES:
                gain = figures.get(f"{measure}_over_control")
                gains.append(f"{gain['gain']:+.3f} ± {gain['error']:.3f}" if gain else "")
            length = f"{figures['acceptance_length']:.3f}"
            first = f"{sum(figures['accepted_per_position'][:1]):.3f}"
            rows.append([name, run["steps"], kind, length, gains[0], first, gains[1]])
    headings = "run | steps | prompts | acceptance length | over control | place 1 | over control"
    return markdown(headings, rows)
