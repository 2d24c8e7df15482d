"""The files on the page about operating a server, tried by the programs that read them."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.cli import main
from dflash_jax.server.access_log import RECORD, AccessRecord, JsonLines
from dflash_jax.server.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = {
    match[1]: text for _, text in BLOCKS if (match := re.match(r"# (/etc/\S+)\n", text))
}  # by path
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def needed(name: str) -> str:
    """The path of a program; without it, the test is skipped."""
    path = shutil.which(name, path=SBIN)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def ran(*command: object) -> str:
    """What a command that has to succeed prints."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def names() -> set[str]:
    """Names of all metrics, without the prefix."""
    kinds = re.findall(
        r"^# TYPE dflash_jax:(\S+) (\S+)$", Metrics().text([]).decode(), re.MULTILINE
    )
    found = {name for name, _ in kinds}
    return found | {f"{name}_bucket" for name, kind in kinds if kind == "histogram"}


def test_the_configuration_and_the_keys_pass_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(FILES["/etc/dflash-jax/keys"], encoding="utf-8")
    text = FILES["/etc/dflash-jax/serve.toml"].replace("/etc/dflash-jax/keys", str(keys))
    text = text.replace("/srv/models/Qwen3-8B", "tiny").replace("8192", "4096")
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    assert main(["serve", "--check", "--config", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "keys     alice, bob" in out
    assert err == ""


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = needed("systemd-analyze")
    text = FILES["/etc/systemd/system/dflash-jax.service"]
    assert "/opt/dflash-jax/current/bin/dflash-jax" in text
    unit = tmp_path / "dflash-jax.service"
    command = text.replace("/opt/dflash-jax/current/bin/dflash-jax", sys.executable)
    unit.write_text(command, encoding="utf-8")
    said = ran(analyze, "verify", "--man=no", unit)
    assert "dflash-jax.service" not in said  # where it would say what is wrong
    unit.write_text(command.replace("TimeoutStopSec", "TimoutStopSec"), encoding="utf-8")
    assert "TimoutStopSec" in ran(analyze, "verify", "--man=no", unit)


def test_nginx_takes_its_file(tmp_path: Path) -> None:
    nginx, openssl = needed("nginx"), needed("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ("-subj", "/CN=llm.example.com", "-days", "1", "-nodes", "-newkey", "rsa:2048")
    ran(openssl, "req", "-x509", *subject, "-keyout", key, "-out", certificate)
    text = FILES["/etc/nginx/conf.d/dflash-jax.conf"]
    text = text.replace("/etc/ssl/certs/llm.example.com.pem", str(certificate))
    text = text.replace("/etc/ssl/private/llm.example.com.key", str(key))
    text = text.replace("listen 443 ssl", "listen 127.0.0.1:18443 ssl")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {tmp_path / kind};\n" for kind in kinds)
    whole = (
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error;\nevents {{}}\n"
        f"http {{\n{paths}access_log off;\n{text}}}\n"
    )
    (tmp_path / "nginx.conf").write_text(whole, encoding="utf-8")
    assert "successful" in ran(nginx, "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf")


def test_caddy_takes_its_file(tmp_path: Path) -> None:
    caddy = needed("caddy")
    file = tmp_path / "Caddyfile"
    file.write_text(FILES["/etc/caddy/Caddyfile"], encoding="utf-8")
    ran(caddy, "validate", "--adapter", "caddyfile", "--config", file)


def test_logrotate_takes_its_file(tmp_path: Path) -> None:
    logrotate = needed("logrotate")
    file = tmp_path / "rotate"
    file.write_text(FILES["/etc/logrotate.d/dflash-jax"], encoding="utf-8")
    file.chmod(0o644)
    assert "error" not in ran(logrotate, "-d", file)


def test_jq_answers_the_questions_to_the_log(tmp_path: Path) -> None:
    jq = needed("jq")
    form, lines = JsonLines(), ["importing JAX"]  # as another library prints
    for number in range(20):
        record = AccessRecord(method="POST", path="/v1/completions", status=200, key="alice")
        fields = record.fields() | {"prompt_tokens": 2, "output_tokens": 3, "queued_s": 0.1}
        fields |= {"first_token_s": number / 10, "seconds": 2.0 * number}
        line = logging.LogRecord("a", logging.INFO, "", 0, "", (), None)
        setattr(line, RECORD, fields)
        lines.append(form.format(line))
    lines.append(form.format(logging.LogRecord("a", logging.INFO, "", 0, "ready", (), None)))
    [first, *questions] = re.findall(r"jq .*'[^'\n]+'", PAGE)[:5]
    select = re.findall(r"'([^']+)'", first)[0]
    read = subprocess.run(
        [jq, "-R", select], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    (tmp_path / "requests.json").write_text(read.stdout, encoding="utf-8")
    found = []
    for question in questions:
        options, text = re.fullmatch(r"jq (-s )?'([^']+)'", question).groups()  # type: ignore[union-attr]
        answer = ran(jq, "-c", *([options.strip()] if options else []), text,
                     tmp_path / "requests.json")  # fmt: skip
        found.append([json.loads(line) for line in answer.splitlines()])
    assert found[:3] == [
        [[{"status": 200, "requests": 20}]], [[{"key": "alice", "tokens": 100}]], [1.9]
    ]  # fmt: skip
    assert [each["seconds"] for each in found[3]] == [32.0, 34.0, 36.0, 38.0]


def test_prometheus_files_name_metrics_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    scraped = yaml.safe_load(FILES["/etc/prometheus/prometheus.yml"])
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9100"]
    [group] = yaml.safe_load(FILES["/etc/prometheus/rules/dflash-jax.yml"])["groups"]
    expressions = " ".join(rule["expr"] for rule in group["rules"])
    asked = set(re.findall(r"dflash_jax:(\w+)", expressions))
    assert len(asked) == 3
    assert asked <= names()


def test_metrics_to_watch_are_those_that_there_are() -> None:
    table = PAGE[PAGE.index("| metric |") : PAGE.index("# /etc/prometheus/rules")]
    firsts = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    listed = {name for cell in firsts for name in re.findall(r"`([a-z]+_[a-z_]+)`", cell)}
    assert len(listed) > 12
    assert listed <= names()
