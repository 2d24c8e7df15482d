"""One model over two workers that Ray places, here on one machine."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.soak.test_hosts import CHAT, busy, chat, hosted_server, is_alive, post, text_of

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_workers_on_a_cluster_are_replaced_when_one_dies(tmp_path: Path) -> None:
    with hosted_server(tmp_path, "--warm", "none", "--ray", "local") as server:
        before = server.workers()
        expected = text_of(post(server.url, CHAT, chat("List three colours.")))
        with busy(server.url) as ends:
            hit = time.monotonic()
            os.kill(before[1], signal.SIGKILL)
            server.wait_not_ready(10)
        assert len(ends) == 10
        assert "host_failed" in {code for _, code in ends}
        assert max(at for at, _ in ends) - hit < 10
        server.wait_ready(90)
        print(f"ready after {time.monotonic() - hit:.1f} s")
        assert text_of(post(server.url, CHAT, chat("List three colours."))) == expected
        assert not [pid for pid in before if is_alive(pid)]
        assert len(server.workers()) == 2


def test_no_worker_is_left_when_the_front_of_a_cluster_is_killed(tmp_path: Path) -> None:
    with hosted_server(tmp_path, "--warm", "none", "--ray", "local") as front:
        workers = front.workers()
        front.process.kill()
        end = time.monotonic() + 10
        while any(map(is_alive, workers)):
            assert time.monotonic() < end
            time.sleep(0.05)
