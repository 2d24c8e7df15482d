"""One model over two hosts that Ray places, here on one machine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.soak.test_hosts import CHAT, OPTIONS, ROOT, WAIT, chat, followers_named, post, text_of

pytest.importorskip("ray", reason="the extra `ray` is not installed")
PROMPTS = ("List three colours.", "What is 2 plus 3?", "Say hello.", "Write a haiku.")
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


def test_a_replica_over_two_hosts_is_replaced_under_load_when_one_is_killed(url: str) -> None:
    """No request that is answered meanwhile has a wrong token; the others are refused by name."""
    expected = {text: text_of(post(url, CHAT, chat(text))) for text in PROMPTS}
    answered: list[tuple[str, httpx.Response]] = []
    ended = threading.Event()

    def ask(text: str) -> None:
        while not ended.is_set():
            try:
                answer = post(url, CHAT, chat(text))
            except httpx.HTTPError:  # the connection ended with the replica
                continue
            answered.append((text, answer))
            if answer.status_code != 200:
                ended.wait(0.5)

    [follower] = followers_named("Follower.follow")
    clients = [threading.Thread(target=ask, args=(text,)) for text in PROMPTS]
    for client in clients:
        client.start()
    try:
        assert soon(lambda: len(answered) >= 3 * len(PROMPTS))
        os.kill(follower, signal.SIGKILL)
        assert soon(lambda: followers_named("Follower.follow") not in ([follower], []))
        before = len(answered)
        assert soon(lambda: {text for text, x in answered[before:] if x.is_success} == {*PROMPTS})
    finally:
        ended.set()
        for client in clients:
            client.join()
    for text, answer in answered:
        assert answer.status_code in (200, 500, 503), answer.text
        if answer.is_success:
            assert text_of(answer) == expected[text]


def soon(happened: Callable[[], bool]) -> bool:
    """Return whether something happens in time."""
    end = time.monotonic() + WAIT
    while not happened() and time.monotonic() < end:
        time.sleep(0.2)
    return happened()
