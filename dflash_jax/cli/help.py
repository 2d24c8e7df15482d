"""Help of commands: `--help` shows the options that most users need, `--help-all` every one."""

import argparse
import contextlib
import difflib
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from dflash_jax.cli.terminal import FEWEST
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import DFlashError
from dflash_jax.plan import Plan
from dflash_jax.serve_options import ServeOptions


def _rare_model_options(*usual: str) -> tuple[str, ...]:
    """Return the options of models and plans without the usual ones."""
    others = ("layer_ids", "lora", "tokenizer", "target_device", "drafter_device", "plan_file")
    shown = {"max_length", "weights", *usual}
    return tuple(name for name in (*Plan.fields(), *others) if name not in shown)


# Options of requests without the usual ones.
_RARE_SAMPLING = tuple(SamplingParams.fields().keys() - {"max_tokens", "temperature"})

# By command, the attributes set by options that only `--help-all` shows.
HIDDEN = {
    "generate": ("prompt_ids", "raw", "json", *_RARE_SAMPLING, *_rare_model_options()),
    "chat": (*_RARE_SAMPLING, *_rare_model_options()),
    "serve": (
        *(name for name, field in ServeOptions.fields().items() if field.rare),
        *_rare_model_options("rows"),
    ),
    "explain": ("params", "stablehlo", "hlo", *_rare_model_options("rows", "dtype")),
    "bench": ("temperature", "seed", "repeats", "name", "out", *_rare_model_options("rows")),
    "verify": ("prompt_ids", "raw", "system", *_RARE_SAMPLING, *_rare_model_options()),
    "replay": _rare_model_options(),
    "tune": ("json", "rounds", *_rare_model_options("rows")),
}


class CommandParser(argparse.ArgumentParser):
    """The parser of a command. Its `--help` leaves out the options of `hide`."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._hidden: frozenset[str] = frozenset()
        # By option, a function that reads defaults of other options from its file.
        self.defaults_by_file: dict[str, Callable[[str], dict[str, Any]]] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; those of files are defaults, wherever their options are."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for flag in self.defaults_by_file:
            first.add_argument(flag, dest=flag, nargs="?")
        files = vars(first.parse_known_args(args)[0]) if args else {}
        for flag, path in files.items():
            if not path:
                continue
            try:
                self.set_defaults(**self.defaults_by_file[flag](path))
            except (OSError, UnicodeError, DFlashError) as error:
                self.error(f"argument {flag}: {path}: {error}")
        return super().parse_known_args(args, namespace)

    def hide(self, names: Iterable[str]) -> None:
        """Show options in the output of `--help-all` only, which is added.

        Args:
          names: attributes that the options set; names of other commands' options are ignored.
        """
        self._hidden = frozenset(names)
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every option and exit")

    def format_help(self) -> str:
        """Return the help with the usual options."""
        with _suppressed(self._left_out()) as count:
            text = super().format_help()
        note = f"{count} more options: {self.prog} --help-all, and docs/plan.md"
        width = shutil.get_terminal_size().columns - 2  # as argparse does
        return f"{text}\n{textwrap.fill(note, max(width, FEWEST))}\n" if count else text

    def format_usage(self) -> str:
        """Return the usage with the usual options."""
        with _suppressed(self._left_out()):
            return super().format_usage()

    def format_help_all(self) -> str:
        """Return the help with every option."""
        return super().format_help()

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with the error that these arguments are unknown, and options of similar names.

        Raises:
          SystemExit: always.
        """
        text = f"unrecognized arguments: {' '.join(unknown)}"
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        flags = [flag for action in actions for flag in action.option_strings]
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        near: set[str] = set()
        for word in wrong:
            near.update(difflib.get_close_matches(word, flags, 2, 0.75))
        if near:
            text += f"; did you mean {' or '.join(sorted(near))}?"
        elif not wrong:
            text += "; a text with spaces needs quotes"
        self.error(text)

    def _left_out(self) -> list[argparse.Action]:
        return [x for x in self._actions if x.dest in self._hidden and x.help != argparse.SUPPRESS]


class _HelpAll(argparse.Action):
    """Prints the help with every option, and exits."""

    def __call__(self, parser: Any, *unused: Any, **more: Any) -> None:
        print(parser.format_help_all(), end="")
        parser.exit()


@contextlib.contextmanager
def _suppressed(actions: list[argparse.Action]) -> Iterator[int]:
    """Leave actions out of help texts while the block runs; yields their number."""
    texts = [action.help for action in actions]
    for action in actions:
        action.help = argparse.SUPPRESS
    try:
        yield len(actions)
    finally:
        for action, text in zip(actions, texts, strict=True):
            action.help = text
