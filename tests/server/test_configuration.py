"""`dflash-jax serve --config` and `--check`, and what is refused before JAX is imported."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.cli import main, parser
from dflash_jax.errors import RequestError
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.configuration import accepted_keys

FILE = """
host = "127.0.0.1"
port = 0
rows = 2
max-length = 512
mesh = [1, 1]
timeout = 60
quiet = true
cors_origin = ["https://page.example"]

[model.small]
target = "tiny"
drafter = "none"

[model]
other = "tiny"

[alias]
claude-sonnet = "small"

[keys]
alice = "sk-1"

[keys.bob]
key = ["sk-2", "sk-3"]
rpm = 60
"""
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file that nobody else can read."""
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)

    def written(text: str) -> Path:
        path = tmp_path / "serve.toml"
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")
        return path

    return written


def served(*words: object) -> ServeOptions:
    options = parser().parse_args(["serve", *map(str, words)])
    options.check(options)
    return options.serve


def test_a_file_sets_what_flags_set_and_flags_come_first(write: Write) -> None:
    file = write(FILE.replace("[model]\nother", "[model.other]\ntarget"))
    options = served("--config", file)
    assert options == ServeOptions.of({"config": str(file)})  # as Ray reads it
    assert (options.first_name, options.target, options.drafter) == ("small", "tiny", "none")
    assert options.models == {"other": ("tiny", "own")}
    assert options.aliases == (("claude-sonnet", "small"),)
    assert (options.timeout, options.quiet, options.port) == (60, True, 0)
    assert (options.plan.rows, options.plan.max_length, options.plan.mesh) == (2, 512, (1, 1))
    found = [(key.label, key.limits.rpm) for key in accepted_keys(options, print)]
    assert found == [("alice", None), ("bob", 60), ("bob", 60)]
    changed = served("--rows", "3", "--config", file, "--cors-origin", "https://other.example")
    assert changed.plan.rows == 3
    assert changed.cors_origin == ("https://page.example", "https://other.example")


def test_every_flag_of_the_server_can_be_in_a_file(write: Write) -> None:
    samples = {
        "model": ["x=tiny"], "alias": ["x=tiny"], "ray": None, "hosts": 1, "recovery": "all",
        "lora": None, "tokenizer": None, "config": None, "cors_origin": ["http://a"],
        "allowed_host": ["a"], "api_key_file": None, "max_body": 10, "max_bodies": 10,
    }  # fmt: skip
    for name, field in ServeOptions.fields().items():
        value = samples.get(name, field.default)
        if value is None:
            value = "tiny" if name == "name" else None
        if value is None:
            continue
        text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        options = served("--config", write(f"{name} = {text}\n"), "--port", "0")
        expected = tuple(value) if isinstance(value, list) else value
        if name != "port":
            assert getattr(options, name) == expected, name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "cannot be read: Invalid value"),
        ("a = 1\na = 2", "cannot be read: Cannot overwrite a value"),
        ("x = " + "[" * 5000, "cannot be read: "),
        ("prot = 8000", "'prot' is no option of `dflash-jax serve`; did you mean 'port'?"),
        ("port = 99999", "--port is 99999; expected an integer from 0 to 65535"),
        ("port = 80.5", "--port is 80.5; expected an integer from 0 to 65535"),
        ("port = true", "--port is True; expected an integer"),
        ("quiet = 'yes'", "--quiet is 'yes'; expected true or false"),
        ("host = true", "--host is True; expected a text"),
        ("host = ['a']", "--host is ['a']; expected a text"),
        ("rows = 0", "rows is 0"),
        (
            "rows = 0\nport = -1\nprot = 1",
            "did you mean 'port'? rows is 0; expected an integer of at",
        ),
        ("rows = 0\nport = -1", "at least 1. --port is -1; expected an integer from 0 to 65535"),
        ("model = [5]", "--model is (5,); expected a list of texts"),
        ("temperature = inf", "--temperature is inf; expected a number from 0 to 1000000.0"),
        ("warm = 'hot'", "--warm is 'hot'; expected one of none, common, all"),
        ("mesh = 'x'", "mesh is 'x'; expected two integers (data, model), such as [1, 4]"),
        ("[server]\nport = 8000", "has a table [server]; expected [model.NAME], [alias] or [keys]"),
        ("[model]\na = 5", "[model.a] has target 5 and drafter 'own'; expected texts"),
        ("[model.a]\ndrafter = 'own'", "[model.a] has target None"),
        ("[model.a]\ntarget = 'a,b'", "without a comma in the target's"),
        ("[model.a]\ntarget = 'tiny'\nrows = 2", "'rows' is no field of [model.a]"),
        ("[alias]\na = 'none'", "--alias 'a=none': expected a new NAME=MODEL"),
        ("model = ['a']", "--model 'a': expected a new NAME=TARGET[,DRAFTER]"),
        ("max_body = 10\nmax_bodies = 5", "--max-bodies is 5; expected at least --max-body, 10"),
    ],
)
def test_mistakes_in_a_file_are_named(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = write(text)
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(file)])
    error = capsys.readouterr().err
    assert f"argument --config: {file}: " in error
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys]\nalice = 5", "the key 'alice': expected key = 'TEXT'"),
        ("keys = 5", "keys is no table; write [keys] before them"),
        ("[keys.alice]\nkey = 'secret'\nlimit = 5", "has a wrong entry 'limit'"),
        ("max_length = 5000", "max_length is 5000, but tiny was made for 4096 positions"),
        ("target = 'tiny/drafter'", "is a drafter; a target is needed"),
        ("drafter = 'tiny/target'", "is a target; a drafter is needed"),
        ("[model]\na = 'tiny'\nb = './none'", "there is no target at none"),
        ("api_key_file = './none'", "--api-key-file ./none cannot be read"),
    ],
)
def test_checks_end_with_what_is_wrong(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert main(["serve", "--check", "--config", str(write(text))]) == 1
    out, error = capsys.readouterr()
    assert message in error
    assert "secret" not in error
    assert out == ""


def test_a_check_says_what_would_be_served(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(FILE.replace("[model]\nother", "[model.other]\ntarget"))
    assert main(["serve", "--check", "--config", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: good",
        "address  127.0.0.1, port 0",
        "models   small, other",
        "aliases  claude-sonnet of small",
        "keys     alice, bob",
    ]
    file.chmod(0o644)
    assert main(["serve", "--check", "--config", str(file)]) == 0
    assert f"other users can read the keys in {file}" in capsys.readouterr().err


def test_keys_of_the_file_are_read_again(write: Write) -> None:
    options = ServeOptions.of({"config": str(write("[keys]\nalice = 'a'\n"))})
    assert [key.label for key in accepted_keys(options, print)] == ["alice"]
    write("[keys]\nalice = 'a'\nbob = 'b'\n")
    assert [key.label for key in accepted_keys(options, print)] == ["alice", "bob"]
    write("[keys]\nalice = \n")
    with pytest.raises(RequestError, match="cannot be read: Invalid value"):
        accepted_keys(options, print)


BAD = [
    ["--port", "PORT"],
    ["--host", "192.0.2.1"],
    ["--api-key-file", "none"],
    ["--model", "nameless"],
    ["--model", "a=./none"],
    ["--max-length", "99999"],
    ["--drafter", "tiny/target"],
    ["--warm", "hot"],
]


def test_arguments_are_refused_before_jax_is_imported(tmp_path: Path) -> None:
    """All in one process, which must not have imported JAX at its end."""
    code = f"""
import contextlib, io, sys
from dflash_jax.cli import main
for words in {BAD!r}:
    words = [sys.argv[1] if word == "PORT" else word for word in words]
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            code = main(["serve", *words])
        except SystemExit as exit:
            code = exit.code
    assert code, words
    said = error.getvalue().replace("-", "_")
    assert words[0].lstrip("-").replace("-", "_") in said, said
    assert "Traceback" not in error.getvalue()
assert "jax" not in sys.modules
"""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-c", code, port]
        environment: dict[str, Any] = {k: v for k, v in os.environ.items() if k != "DFLASH_API_KEY"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
