"""Engines refuse to work in processes forked after JAX started, instead of hanging."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

START = """
import json, multiprocessing, os, sys, threading, warnings
warnings.simplefilter("ignore")  # of JAX, about forks
import numpy as np
import dflash_jax as dj
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target

def engine(folder=""):
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    cache = {"prefix_cache": 2**20, "prefix_folder": folder} if folder else {}
    return random_engine(target, drafter, dj.Plan(max_length=64, chunk=16, block=4, **cache))

def forked(work):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(told).encode())
        os._exit(0)  # JAX itself may crash where a fork ends in order
    os.close(write)
    with os.fdopen(read) as pipe:
        told = json.loads(pipe.read())
    status = os.waitpid(child, 0)[1]
    assert status == 0, (status, told)
    return told
"""
USED = """
made = engine(sys.argv[1])
before = made.generate([1, 2, 3], max_tokens=8).token_ids
model = dj.TargetModel(made.graph.config, made.params["target"], "float32")
model.forward([[1, 2]])
handle, stream = made.submit([4], max_tokens=8), made.submit([5], max_tokens=8)
pieces = iter(stream)
next(pieces)
held = threading.Event()

def hold():  # as a thread of a server may, at the moment of a fork
    with made.core._turns:
        held.set()
        release.wait()

release = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
uses = {
    "generate": lambda: made.generate([1], max_tokens=1),
    "generate_many": lambda: made.generate_many([[1]]),
    "submit": lambda: made.submit([1]),
    "prepare": lambda: made.prepare([1]),
    "check": lambda: made.check([1]),
    "advance": made.advance,
    "close a request": handle.close,
    "iterate": lambda: next(pieces),
    "close a stream": stream.close,
    "busy": lambda: made.core.busy,
    "warm_up": lambda: made.warm_up("penalized"),
    "close": made.close,
    "params": lambda: made.update_params(made.params),
    "forward": lambda: model.forward([[1]]),
    "load": lambda: dj.load("tiny"),
    "load_target": lambda: dj.load_target("tiny"),
    "new": engine,
    "child of a child": lambda: forked(made.advance),
}
told = {name: forked(use) for name, use in uses.items()}
release.set()

def in_pool():
    return made.generate([1])

with multiprocessing.get_context("fork").Pool(1) as pool:
    try:
        pool.apply(in_pool)
    except Exception as error:
        told["pool"] = f"{type(error).__name__}: {error}"
assert made.generate([1, 2, 3], max_tokens=8).token_ids == before
assert len([token for piece in stream for token in piece.token_ids]) == 8
made.close()
print(json.dumps(told), flush=True)
"""
UNUSED = """
told = forked(lambda: engine().generate([1, 2, 3], max_tokens=4).token_ids)
assert told == engine().generate([1, 2, 3], max_tokens=4).token_ids
print(json.dumps(told), flush=True)
"""


def run(text: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", START + text, *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks"),
]


def test_every_use_in_a_process_forked_after_jax_started_is_refused(tmp_path: Path) -> None:
    told = run(USED, str(tmp_path))
    assert len(told) == 19
    for name, error in told.items():
        assert error.startswith("ForkedProcessError: process "), (name, error)
        assert 'get_context("spawn"), or load models after forking' in error


def test_a_process_forked_before_jax_started_may_load_and_generate() -> None:
    assert len(run(UNUSED)) == 4
