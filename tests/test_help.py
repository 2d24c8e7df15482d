"""Help of commands, and completion in a shell."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_jax.cli import help as help_
from dflash_jax.cli import main, parser
from dflash_jax.cli.help import HIDDEN, CommandParser
from dflash_jax.cli.installation import SHELLS
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import RequestError
from dflash_jax.plan import Plan

MOST = 14  # options that `--help` shows, `-h` and `--help-all` not counted


def commands() -> dict[str, CommandParser]:
    [found] = [x for x in parser()._actions if isinstance(x, argparse._SubParsersAction)]
    return dict(found.choices)


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_help_shows_the_usual_options_and_names_the_way_to_the_others(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, every = (shown([name, flag], capsys) for flag in ("--help", "--help-all"))
    known = [x for x in commands()[name]._actions if x.help != argparse.SUPPRESS]
    flags = [flag for action in known for flag in action.option_strings[-1:]]
    missing = [flag for flag in flags if f" {flag}" not in usual]
    assert all(f" {flag}" in every for flag in flags)
    assert len(flags) - len(missing) <= MOST + 2
    assert missing
    assert f"{name} --help-all, and docs/plan.md" in usual
    assert "more options" not in every
    others = {*HIDDEN[name]} - Plan.fields().keys() - SamplingParams.fields().keys()
    assert {x.dest for x in known} >= others


def test_hidden_options_work_and_are_not_in_the_usage_of_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parser().parse_args(["generate", "a", "--seed", "7", "--chunk", "16"]).seed == 7
    with pytest.raises(SystemExit):
        main(["generate", "--wings"])
    assert "--chunk" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--blok", "4"], "unrecognized arguments: --blok 4; did you mean --block?"),
        (["--xyz"], "unrecognized arguments: --xyz\n"),
        (["three", "colours."], "arguments: three colours.; a text with spaces needs quotes"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_option_that_was_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "List", *words])
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["20", "60"])
def test_help_fits_a_narrow_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = shown(["generate", "--help"], capsys).splitlines()
    wide = [line.strip() for line in lines if len(line) > int(columns)]
    assert all(line.startswith(("[", "-", "usage:")) for line in wide)  # options are not broken


def test_texts_of_options_are_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = commands()["generate"]
    before = [action.help for action in generate._actions]

    def failing(self: argparse.ArgumentParser) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(argparse.ArgumentParser, "format_help", failing)
    with pytest.raises(RuntimeError, match="broken"):
        help_.CommandParser.format_help(generate)
    assert [action.help for action in generate._actions] == before


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install -e .")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for text in ("generate", "--steps-per-call")[: 1 if shell == "tcsh" else 2]:
        assert text in script
    if shell != "bash" or shutil.which("bash") is None:
        return
    file = tmp_path / "dflash-jax"
    file.write_text(script)
    press = f'source {file}; COMP_WORDS=(dflash-jax serve --al); COMP_CWORD=2; COMP_LINE="${{'
    press += 'COMP_WORDS[*]}"; $(complete -p dflash-jax | sed "s/.*-F \\([^ ]*\\).*/\\1/");'
    press += ' echo "${COMPREPLY[*]}"'
    done = subprocess.run(["bash", "-c", press], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["--alias", "--allowed-host"], done.stderr


def test_completion_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from dflash_jax.cli import installation

    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(RequestError, match="pip install shtab"):
        installation.print_completion(argparse.Namespace(shell="bash"))
