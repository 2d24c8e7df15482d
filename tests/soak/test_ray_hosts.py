"""One model over two hosts that Ray places, here on one machine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.soak.test_hosts import CHAT, OPTIONS, ROOT, WAIT, chat, followers_named, post, text_of

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, "-m", "dflash_jax", "serve", "--hosts", "2", "--mesh", "1x4"]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    variables.pop("XLA_FLAGS", None)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *OPTIONS, "--warm", "none", "--ray", "local"],
            cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        listening = next((x for x in lines if "listening on" in x), "")
        found = re.search(r"listening on (\S+)", listening)
        assert found, (folder / "log").read_text()[-3000:]
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        process.stdout.close()
        end = time.monotonic() + 30
        while followers_named("Follower.follow"):
            assert time.monotonic() < end
            time.sleep(0.2)


def test_a_replica_over_two_hosts_is_replaced_when_one_is_killed(url: str) -> None:
    expected = text_of(post(url, CHAT, chat("List three colours.")))
    [follower] = followers_named("Follower.follow")
    os.kill(follower, signal.SIGKILL)
    end = time.monotonic() + WAIT
    while True:
        answer = httpx.post(url + CHAT, json=chat("List three colours."), timeout=WAIT)
        if answer.status_code == 200 and followers_named("Follower.follow") not in ([follower], []):
            break
        if answer.status_code != 200:
            assert answer.status_code in (500, 503), answer.text
        assert time.monotonic() < end
        time.sleep(1)
    assert text_of(answer) == expected
