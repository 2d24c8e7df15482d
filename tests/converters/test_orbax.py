"""Checkpoints as a layout: conversion, comparison, export and decoding."""

import contextlib
import dataclasses
import json
import math
import os
import resource
import signal
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from gguf_models import Q, write_target
from weight_files import ORACLE

import dflash_jax as dj
from dflash_jax.converters.cli import main
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError
from dflash_jax.families import gemma4

TARGET, DRAFTER = ORACLE / "targets" / "qwen3", ORACLE / "drafters" / "v2"


def leaves(node, path=()):
    if isinstance(node, dict):
        return {k: v for key, child in node.items() for k, v in leaves(child, (*path, key)).items()}
    return {"/".join(path): node}


def test_a_family_without_a_folder_of_ours_becomes_a_checkpoint(tmp_path, capsys, monkeypatch):
    source, place = str(ORACLE / "targets" / "gemma4"), tmp_path / "ours"
    unwritten = dataclasses.replace(gemma4.FAMILY, to_hf=None)
    monkeypatch.setattr(gemma4, "FAMILY", unwritten)
    assert main(["convert", source, str(place)]) == 1
    assert "`convert --to orbax`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["convert", source, str(place), "--to", "orbax"]) == 0
    assert open_model(place).config == open_model(source).config


def test_a_checkpoint_may_replace_its_source(tmp_path, capsys):
    file = write_target(TARGET, tmp_path / "x.gguf", Q.Q8_0)
    place = tmp_path / "ours"
    arguments = ["--to", "orbax", "--dtype", "float32", "--json"]
    assert main(["convert", str(file), str(place), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((place / "conversion.json").read_text()) == report
    ours, theirs = open_model(place, role="target"), open_model(file)
    assert (ours.layout, ours.config.dtype) == ("our checkpoint (orbax)", "float32")
    params, expected = leaves(ours.load("float32")), leaves(theirs.load("float32"))
    assert params.keys() == expected.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(array, expected[name], name)
    assert main(["compare", str(file), str(place)]) == 0
    assert main(["compare", str(TARGET), str(place)]) == 1  # Q8_0's error in plain float32
    assert main(["inspect", str(place), "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text[text.index("{\n") :])
    assert (found["problem"], found["bytes_by_type"].keys()) == (None, {"F32"})
    assert main(["export", str(place), str(tmp_path / "back")]) == 0
    assert main(["compare", str(place), str(tmp_path / "back")]) == 0
    ids = np.arange(8)[None]
    logits = [np.asarray(dj.load_target(p).forward(ids).logits) for p in (file, place)]
    np.testing.assert_array_equal(*logits)


def test_a_drafter_becomes_a_checkpoint_and_comes_back(tmp_path):
    place, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", str(DRAFTER), str(place), "--to", "orbax"]) == 0
    assert main(["compare", str(DRAFTER), str(place)]) == 0
    assert open_model(place, role="drafter").config == open_model(DRAFTER).config
    assert main(["export", str(place), str(back)]) == 0
    assert main(["compare", str(DRAFTER), str(back)]) == 0


def test_a_damaged_checkpoint_is_one_line(tmp_path, capsys):
    place = tmp_path / "ours"
    assert main(["convert", str(DRAFTER), str(place), "--to", "orbax"]) == 0
    assert main(["convert", str(DRAFTER), str(place), "--to", "orbax"]) == 1
    assert "give --overwrite" in capsys.readouterr().err
    (place / "weights" / "manifest.ocdbt").unlink()
    assert main(["compare", str(DRAFTER), str(place)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("converters: CheckpointError: ")
    assert error.count("\n") == 1
    with pytest.raises(CheckpointError, match="is missing"):
        open_model(place)


def test_a_conversion_cut_short_leaves_no_checkpoint(tmp_path, monkeypatch):
    from dflash_jax import checkpoint
    from dflash_jax.converters import convert
    from dflash_jax.utils import atomic

    monkeypatch.setattr(atomic, "remove", lambda path: None)  # as if killed
    monkeypatch.setattr(checkpoint, "checksum", lambda path: 1 / 0)  # once weights are written
    with pytest.raises(ZeroDivisionError):
        convert.convert(open_model(DRAFTER), tmp_path / "ours", to="orbax")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".ours.partial")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_model(left)


def test_a_disk_that_fills_up_is_named_and_keeps_nothing(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", full)
    assert main(["convert", str(DRAFTER), str(tmp_path / "x"), "--to", "orbax"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert "CheckpointError: the disk is full; nothing was left" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["orbax", "maxtext"])
def test_writes_that_fail_in_the_background_show_nothing_and_leave_nothing(
    tmp_path, capfd, monkeypatch, form
):
    monkeypatch.setattr("dflash_jax.utils.atomic._longest_file", lambda: math.inf)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        code = main(["convert", "tiny", str(tmp_path / "x"), "--to", form])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    time.sleep(0.2)  # for writes that would still run
    assert list(tmp_path.iterdir()) == []
    assert code == 1
    assert capfd.readouterr().err == (
        f"converters: CheckpointError: {tmp_path / 'x'} needs a larger file than may be written"
        " there, and nothing was left; raise the limit (ulimit -f), or choose another file system\n"
    )


def test_an_interrupted_save_leaves_no_running_writer(tmp_path, capsys, monkeypatch):
    real, begun = ocp.Checkpointer.save, []

    def save(*arguments, **options):
        """As orbax does: a thread writes, while another waits for it."""

        def late():
            time.sleep(0.05)
            with contextlib.suppress(InterruptedError):
                real(*arguments, **options)

        begun.append(threading.Thread(target=late))
        begun[0].start()
        os.kill(os.getpid(), signal.SIGINT)
        begun[0].join()

    monkeypatch.setattr(ocp.Checkpointer, "save", save)
    assert main(["convert", str(DRAFTER), str(tmp_path / "x"), "--to", "orbax"]) == 130
    begun[0].join()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "\nconverters: interrupted\n"


def test_an_interrupt_while_the_writer_starts_waits_for_it(tmp_path, capsys, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name.startswith("checkpoint"):
            os.kill(os.getpid(), signal.SIGINT)

    def late(*arguments, **options):
        time.sleep(0.05)
        try:
            save(*arguments, **options)
        finally:
            ended.append(True)

    save, ended = ocp.Checkpointer.save, []
    monkeypatch.setattr(ocp.Checkpointer, "save", late)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert main(["convert", str(DRAFTER), str(tmp_path / "x"), "--to", "orbax"]) == 130
    assert ended
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "\nconverters: interrupted\n"
