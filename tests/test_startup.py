"""Startup of the command: without importing JAX where possible, and clean on Ctrl-C."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax
from dflash_jax.utils.command import default_signals, exit_code

LOADING = ("generate", "chat", "serve", "explain", "bench", "verify", "replay", "probe", "train")
COMMANDS = (*LOADING, "inspect", "convert", "compare", "export", "native", "completion")
ANSWERED = [["--version"], ["--help"], *([command, "--help"] for command in COMMANDS)]
MISUSED = [[], ["fly"], ["generate", "--wings"], ["generate", "-n", "x"], ["convert", "a"]]
REFUSED = [
    ["generate"],
    ["generate", "Hello", "-n", "0"],
    ["generate", "Hello", "--temperature", "-1"],
    ["generate", "Hello", "--stop", ""],
    ["generate", "Hello", "--block", "1"],
    ["generate", "Hello", "--target", "./absent"],
    ["generate", "Hello", "--drafter", "./absent"],
    ["generate", "Hello", "--prompt-ids", "1"],
    ["chat", "--top-p", "2"],
    ["bench", "--seed", str(2**64)],
    ["verify", "--prompt-ids", "1,x"],
    ["verify", "--tokenizer", "./absent"],
    ["probe", "Hello", "--out", "logits.txt"],
    ["explain", "--dtype", "int4"],
    ["train", "--out", "run", "--target", "./absent"],
    ["inspect", "./absent"],
]
EVERY = """
import json, sys
from dflash_jax.cli import main

found = []
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    found.append([code, sorted({"jax", "flax", "tokenizers"} & set(sys.modules))])
print("\\n" + json.dumps(found))
"""


def test_help_the_version_and_wrong_arguments_do_not_import_jax(tmp_path: Path) -> None:
    lines = [*ANSWERED, *MISUSED, *REFUSED]
    command = [sys.executable, "-c", EVERY, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes = [0] * len(ANSWERED) + [2] * len(MISUSED) + [1] * len(REFUSED)
    for line, expected, found in zip(
        lines, codes, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        assert found == [expected, []], line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


IMPORTING = """
import json, sys
import jax

before = dict(jax.config.values)
import dflash_jax
names = [name for name in dflash_jax.__all__ if getattr(dflash_jax, name) is None]
modules = dflash_jax.loading.__name__, dflash_jax.graph.cache.__name__
print(json.dumps([names, modules, before == dict(jax.config.values)]))
"""


def test_importing_the_package_reaches_every_name_and_changes_no_setting_of_jax() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    modules = ["dflash_jax.loading", "dflash_jax.graph.cache"]
    assert json.loads(done.stdout) == [[], modules, True]


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'laod'"):
        dflash_jax.laod  # noqa: B018
    assert not hasattr(dflash_jax, "_private")
    assert {"load", "Plan", "Recovery"} <= set(dir(dflash_jax))


def test_an_interrupt_that_says_what_was_saved_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt("training stopped at step 3 of 9; state saved")

    assert exit_code("dflash-jax", stopped) == 130
    assert capsys.readouterr().err.strip().endswith("step 3 of 9; state saved")


# In import order; the command is interrupted once each is imported.
@pytest.mark.sample("dflash_jax.cli")
@pytest.mark.parametrize(
    "module",
    [
        "dflash_jax.cli",
        "dflash_jax.utils.command",
        "argparse",
        "dflash_jax.cli.options",
        "numpy.linalg",
        "jax._src.config",
        "jax._src.lax",
        "flax.core",
        "dflash_jax.nn.decoder",
    ],
)
def test_an_interrupt_while_modules_are_imported_shows_no_traceback(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dflash_jax", "explain"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail(f"{module} was not imported")
        rest = process.stderr.read()
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest


def test_signals_are_handled_as_before_once_modules_are_imported() -> None:
    before = signal.getsignal(signal.SIGINT)
    with default_signals():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job
    try:
        with default_signals():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
