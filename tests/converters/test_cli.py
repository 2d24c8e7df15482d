import ast
import contextlib
import fcntl
import io
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf_models import Q, finish, interleave, write_drafter, write_target
from weight_files import ORACLE, key, raw_gguf, tensor, text

from dflash_jax.converters.cli import main
from dflash_jax.converters.command_parts import ProgressBar
from dflash_jax.converters.convert import keep_apart
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.inspect import check_instruct
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
TARGET = ORACLE / "targets" / "llama3"
DRAFTER = ORACLE / "drafters" / "v1_full"


@pytest.fixture
def target(tmp_path):
    return write_target(TARGET, tmp_path / "t.gguf", Q.Q8_0)


def run_json(capsys, *arguments) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_lists_metadata_tensors_and_the_mix_of_types(capsys, target):
    code, report = run_json(capsys, "inspect", target)
    assert code == 0
    assert report["problem"] is None
    assert report["model"]["config"]["rope"]["kind"] == "llama3"
    assert report["metadata"]["llama.block_count"] == 3
    assert set(report["bytes_by_type"]) == {"Q8_0", "F32"}
    assert report["tensor_count"] == len(report["tensors"]) == 31
    assert 8.5 < report["bits_per_weight"] < 9
    assert main(["inspect", str(target)]) == 0
    assert "blk.0.attn_q.weight      Q8_0     [64, 64]" in capsys.readouterr().out


def test_every_command_accepts_names_of_shipped_models(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, role in (("tiny", "target"), ("tiny/target", "target"), ("tiny/drafter", "drafter")):
        code, report = run_json(capsys, "inspect", name)
        assert (code, report["problem"]) == (0, None)
        assert report["model"]["role"] == role
    assert main(["convert", "tiny", "target"]) == 0
    assert main(["convert", "tiny", "again", "--tokenizer", "tiny"]) == 0
    assert main(["export", "tiny/drafter", "d.gguf", "--format", "gguf"]) == 0
    assert main(["export", "tiny", "exported"]) == 0
    for pair in (["tiny", "target"], ["tiny/drafter", "d.gguf"], ["exported", "tiny"]):
        assert main(["compare", *pair]) == 0
    (tmp_path / "tiny").mkdir()  # what is here goes first
    capsys.readouterr()
    assert main(["inspect", "tiny"]) == 1
    assert "tiny holds neither model.safetensors" in capsys.readouterr().err


def test_numbers_without_a_json_form_are_texts(capsys, tmp_path):
    values = [
        key(name, 6, struct.pack("<f", float(value)))
        for name, value in {"x.nan": "nan", "x.inf": "-inf", "x.one": "1"}.items()
    ]
    (tmp_path / "x.gguf").write_bytes(raw_gguf(values, []))
    code, report = run_json(capsys, "inspect", tmp_path / "x.gguf")
    assert (code, report["metadata"]) == (0, {"x.nan": "nan", "x.inf": "-inf", "x.one": 1.0})


def test_inspect_shows_what_it_cannot_run_with_the_reason(capsys, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(raw_gguf([], [tensor("x", [256], 15, 0)], b"\0" * 292))
    code, report = run_json(capsys, "inspect", path)
    assert (code, report["model"]) == (0, None)
    assert "general.architecture" in report["problem"]
    assert report["tensors"][0]["type"] == "Q8_K"
    code, report = run_json(capsys, "inspect", DRAFTER / "model.safetensors")
    assert "has no configuration" in report["problem"]


def test_a_type_that_cannot_be_decoded_is_named_before_anything_is_read(capsys, tmp_path):
    target = write_target(TARGET, tmp_path / "t.gguf", Q.F16)
    name = text("blk.1.attn_q.weight")
    raw = bytearray(target.read_bytes())
    at = raw.index(name) + len(name) + 4 + 2 * 8
    raw[at : at + 4] = struct.pack("<I", 9)
    target.write_bytes(raw)
    code, report = run_json(capsys, "inspect", target)
    assert code == 0
    assert "blk.1.attn_q.weight: the type Q8_1 cannot be decoded" in report["problem"]
    assert main(["convert", "--dry-run", str(target), str(tmp_path / "x")]) == 1
    assert "Use a file quantised to one of these" in capsys.readouterr().err


def test_a_name_that_the_terminal_cannot_show_is_escaped(monkeypatch, tmp_path):
    safetensors.numpy.save_file({"ü": np.zeros(1)}, tmp_path / "x.safetensors")
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, "ascii"))
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 0
    assert b"\\xfc F64" in shown.getvalue()


def test_convert_writes_gguf_with_the_tokenizer_or_says_that_there_is_none(capsys, tmp_path):
    code, report = run_json(capsys, "convert", "tiny", tmp_path / "t.gguf", "--type", "q4_0")
    assert (code, report["notes"], [*report["fallbacks"]]) == (0, [], ["token_embd.weight"])
    assert report["written"] == {"Q4_0": 42, "Q8_0": 1, "F32": 25}
    for arguments in ([str(TARGET)], ["tiny/drafter"]):
        assert main(["convert", *arguments, str(tmp_path / "x.gguf"), "--overwrite"]) == 0
        assert "no tokenizer was written, without which llama.cpp" in capsys.readouterr().out
    export = ["export", "tiny/drafter", str(tmp_path / "d.gguf"), "--format", "gguf"]
    assert main([*export, "--type", "q8_0"]) == 0
    assert "--tokenizer TARGET copies the target's" in capsys.readouterr().out
    for target in ("tiny", str(tmp_path / "t.gguf")):
        assert main([*export, "--tokenizer", target, "--overwrite"]) == 0
        assert "no tokenizer" not in capsys.readouterr().out
        found = open_gguf(tmp_path / "d.gguf").metadata
        assert found["tokenizer.ggml.pre"] == "smollm"
        assert len(found["tokenizer.ggml.tokens"]) == 2048
    assert main(["convert", "tiny", str(tmp_path / "y"), "--type", "q8_0"]) == 1
    assert "dtype 'q8_0' is not one of float32" in capsys.readouterr().err


def test_a_target_takes_a_tokenizer_from_elsewhere(capsys, tmp_path):
    command = ["convert", str(TARGET), str(tmp_path / "x.gguf"), "--tokenizer"]
    assert main([*command, "tiny"]) == 1  # of a larger vocabulary
    assert "has the id 256; the model has 256 tokens" in capsys.readouterr().err
    assert main([*command, str(tmp_path)]) == 1
    assert "holds no tokenizer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["convert", "tiny", str(tmp_path / "t.gguf")]) == 0
    again = ["convert", "tiny", str(tmp_path / "u.gguf"), "--tokenizer", str(tmp_path / "t.gguf")]
    assert main(again) == 0
    assert (tmp_path / "u.gguf").read_bytes() == (tmp_path / "t.gguf").read_bytes()


def test_convert_accounts_for_every_tensor_and_writes_a_folder_that_loads(capsys, tmp_path, target):
    code, report = run_json(capsys, "convert", target, tmp_path / "out", "--dtype", "float32")
    assert code == 0
    assert report["stored_tensors"] == report["used_tensors"] + len(report["ignored"])
    assert report["ignored"].keys() == {"rope_freqs.weight"}
    changed = {row["stored"] for row in report["tensors"] if row["change"]}
    assert changed == {f"blk.{i}.attn_{x}.weight" for i in range(3) for x in "qk"}
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == report
    assert main(["compare", str(target), str(tmp_path / "out")]) == 0
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    ours, theirs = stored["model.norm.weight"], None
    theirs = safetensors.numpy.load_file(TARGET / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(ours, theirs)


def test_omitted_tensors_of_a_conversion_are_noted(capsys, tmp_path):
    source = tmp_path / "t"
    shutil.copytree(TARGET, source)
    (source / "adapter_config.json").write_text("{}")
    first, second = (tmp_path / name for name in "ab")
    _, report = run_json(capsys, "convert", source, first)
    assert report["notes"] == [
        "the adapter beside the weights (adapter_config.json) is not applied",
        "there is no tokenizer.json: what is written takes token ids only (--tokenizer DIR brings"
        " one)",
    ]
    assert json.loads((first / "conversion.json").read_text()) == report
    (source / "adapter_config.json").unlink()
    (source / "tokenizer.json").write_text("{}")
    assert run_json(capsys, "convert", source, second)[1]["notes"] == []


def test_a_dry_run_writes_nothing_and_prints_the_taps(capsys, tmp_path):
    path = write_drafter(DRAFTER, tmp_path / "d.gguf", "upstream")
    assert main(["convert", str(path), str(tmp_path / "out"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "taps: [0, 1, 3] = dflash.target_layers [1, 2, 4] read as one-based" in out
    assert [p.name for p in tmp_path.iterdir()] == ["d.gguf"]


def test_a_flag_decides_an_ambiguous_file(capsys, tmp_path):
    path = write_drafter(DRAFTER, tmp_path / "d.gguf", "upstream")
    assert (
        main(
            ["convert", str(path), str(tmp_path / "out"), "--dry-run", "--layer-ids", "zero-based"]
        )
        == 0
    )
    assert "taps: [1, 2, 4]" in capsys.readouterr().out


def test_errors_are_one_line_and_exit_code_one(capsys, tmp_path, target):
    (tmp_path / "out").mkdir()
    assert main(["convert", str(target), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("converters: CheckpointError: ")
    assert "--overwrite" in error
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "y")]) == 1
    assert "config.json does not exist" in capsys.readouterr().err
    (tmp_path / "x.txt").write_text("no weights")
    for command in (["inspect"], ["compare", str(TARGET)], ["convert", "--dry-run"]):
        last = [str(tmp_path / "z")] if command[0] == "convert" else []
        for name, message in (("none", "none does not exist"), ("x.txt", "x.txt is no model")):
            assert main([*command, str(tmp_path / name), *last]) == 1
            expected = f"{message}; give a folder, a checkpoint or a .gguf file\n"
            assert capsys.readouterr().err.endswith(expected)
    assert main(["convert", str(target), str(tmp_path / "y"), "--name", "a\udcff"]) == 1
    assert "--name is not UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()
    assert main(["convert", str(target), str(tmp_path), "--overwrite"]) == 1
    assert "which would be lost" in capsys.readouterr().err
    assert target.is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", [["convert", "--to", "orbax"], ["export"]])
def test_a_signal_ends_a_command_and_leaves_nothing_behind(
    capsys, monkeypatch, tmp_path, target, command, number, code
):
    monkeypatch.setattr(ProgressBar, "__call__", lambda *_: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    assert main([*command, str(target), str(tmp_path / "out")]) == code
    assert capsys.readouterr().err.startswith("\nconverters: ")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert signal.getsignal(number) == before


def test_compare_fails_on_a_wrong_transform_and_names_it_worst(capsys, tmp_path):
    good = write_target(TARGET, tmp_path / "good.gguf")
    source = gguf.GGUFReader(good)
    data = bytearray(Path(good).read_bytes())
    wrong = next(t for t in source.tensors if t.name == "blk.1.attn_k.weight")
    rows = wrong.data[::-1].copy()
    data[wrong.data_offset : wrong.data_offset + rows.nbytes] = rows.tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    code, report = run_json(capsys, "compare", TARGET, tmp_path / "bad.gguf")
    assert (code, report["agree"]) == (1, False)
    worst = report["tensors"][0]
    assert (worst["name"], worst["verdict"]) == ("layers.1.self_attn.k_proj.weight", "transform")
    assert worst["rms"] > 1.0
    assert all(t["verdict"] == "ok" for t in report["tensors"][1:])
    assert run_json(capsys, "compare", TARGET, good)[1]["agree"] is True


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q5_0, Q.Q5_1, Q.Q4_0, Q.Q4_1, Q.MXFP4])
def test_compare_accepts_the_error_of_each_type(capsys, tmp_path, kind):
    path = write_target(TARGET, tmp_path / "x.gguf", kind)
    code, report = run_json(capsys, "compare", TARGET, path)
    assert code == 0, report["tensors"][0]


def plus_one(name, array):
    return array + 1 if name.endswith("norm.weight") else array


def sign(name, array):
    return -array if "down_proj" in name else array


def double(name, array):
    return array * 2 if "up_proj" in name else array


def neighbours(name, array):
    return interleave(array, len(array) // 16) if "q_proj" in name else array


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (plus_one, "the second has 1 added"),
        (sign, "the sign is turned"),
        (double, "the first is the second times 0.5"),
        (neighbours, "the second pairs neighbours for rotation"),
    ],
)
def test_compare_names_the_transform_that_would_explain_a_difference(
    capsys, tmp_path, change, hint
):
    tensors = safetensors.numpy.load_file(TARGET / "model.safetensors")
    changed = {name: np.ascontiguousarray(change(name, a)) for name, a in tensors.items()}
    safetensors.numpy.save_file(changed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
    code, report = run_json(capsys, "compare", TARGET, tmp_path)
    assert code == 1
    assert {t["hint"] for t in report["tensors"] if t["verdict"] == "transform"} == {hint}


def test_compare_names_what_only_one_side_has(capsys, tmp_path):
    other = write_target(ORACLE / "targets" / "qwen3", tmp_path / "x.gguf")
    code, report = run_json(capsys, "compare", TARGET, other)
    assert code == 1
    assert "lm_head.weight" in report["only_first"]
    assert "layers.0.self_attn.q_norm.weight" in report["only_second"]
    assert any(line.startswith("head_dim: 16 against 32") for line in report["configs"])
    assert main(["compare", str(TARGET), str(other)]) == 1
    assert "NOT the same model" in capsys.readouterr().out


def test_values_that_are_not_finite_are_counted(capsys, tmp_path):
    tensors = safetensors.numpy.load_file(DRAFTER / "model.safetensors")
    tensors["norm.weight"][:2] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DRAFTER / "config.json").read_text())
    code, report = run_json(capsys, "compare", DRAFTER, tmp_path)
    assert code == 1
    assert (report["tensors"][0]["name"], report["tensors"][0]["not_finite"]) == ("norm.weight", 2)


def test_export_writes_every_format(capsys, tmp_path):
    for layout, name in (("zlab", "z"), ("speculators", "s"), ("gguf", "x.gguf")):
        path = tmp_path / name
        assert main(["export", str(DRAFTER), str(path), "--format", layout]) == 0
        assert main(["compare", str(DRAFTER), str(path)]) == 0
    assert main(["export", str(DRAFTER), str(tmp_path / "h")]) == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "h" / file).read_bytes() == (tmp_path / "z" / file).read_bytes()


def other(name, value):
    def change(folder):
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {name: value}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other("intermediate_size", 64), "wrong shape: layers.0.mlp.down_proj.weight is"),
        (other("num_hidden_layers", 4), "missing: layers.3.input_layernorm.weight"),
        (other("num_hidden_layers", 2), "left over: layers.2.input_layernorm.weight"),
    ],
)
def test_parameters_that_do_not_match_their_config_are_not_exported(
    capsys, tmp_path, change, message
):
    shutil.copytree(TARGET, tmp_path / "t")
    change(tmp_path / "t")
    assert main(["export", str(tmp_path / "t"), str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_that_could_not_be_opened_again_are_refused(capsys, tmp_path):
    for command, name, why in (
        (["export", "--format", "gguf"], "x", "ends in .gguf"),
        (["export"], "x.gguf", "without .gguf"),
        (["convert"], "x.safetensors", "without .safetensors"),
        (["convert", "--to", "orbax"], "x.gguf", "without .gguf"),
    ):
        assert main([*command, str(DRAFTER), str(tmp_path / name)]) == 1
        assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_no_drafter_folder(capsys, tmp_path):
    assert main(["export", str(TARGET), str(tmp_path / "z"), "--format", "zlab"]) == 1
    assert "is a target; the format zlab is for drafters" in capsys.readouterr().err
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize("layout", ["huggingface", "gguf"])
def test_export_does_not_write_over_what_it_reads(capsys, tmp_path, target, layout):
    source = tmp_path / "p" / "drafter"
    shutil.copytree(DRAFTER, source)
    before = (source / "model.safetensors").read_bytes()
    for place in (source, source.parent):
        arguments = ["export", str(source), str(place), "--overwrite", "--format", layout]
        assert main(arguments) == 1
        assert "which would be lost" in capsys.readouterr().err
    arguments = ["export", str(source), str(target), "--overwrite", "--format", "gguf"]
    assert main([*arguments, "--tokenizer", str(target)]) == 1
    assert "which would be lost" in capsys.readouterr().err
    assert (source / "model.safetensors").read_bytes() == before


def test_files_that_a_source_leads_to_are_not_written_over(capsys, tmp_path, target):
    hub = tmp_path / "models--x"
    snapshot = hub / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(DRAFTER / file, hub / "blobs" / file)
        (snapshot / file).symlink_to(hub / "blobs" / file)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in ("tokenizer.json", "config.json"):
        (tokenizer / file).write_text("{}")
    for source, place in (
        ([str(snapshot)], hub / "blobs"),
        ([str(target), "--tokenizer", str(tokenizer)], tokenizer),
    ):
        assert main(["convert", *source, str(place), "--overwrite"]) == 1
        assert "which would be lost" in capsys.readouterr().err
    inside = snapshot / "x.gguf"  # a drafter's folder is a usual place for its .gguf file
    for _ in range(2):
        assert main(["export", str(snapshot), str(inside), "--format", "gguf", "--overwrite"]) == 0


def test_no_part_of_a_set_is_written_over(tmp_path):
    first, second, other = (
        tmp_path / f"{x}.gguf" for x in ("t-00001-of-00002", "t-00002-of-00002", "d")
    )
    for file in (first, second, other):
        file.touch()
    keep_apart(first, other)
    for source in (first, second):
        with pytest.raises(CheckpointError, match="which would be lost"):
            keep_apart(source, second)


@pytest.mark.parametrize(("columns", "longest"), [(40, 39), (200, 78), (0, 78)])
def test_progress_fits_into_the_terminals_line(monkeypatch, columns, longest):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        model = open_model(TARGET)
        with ProgressBar(model.tensors) as progress:
            progress("layers.0.self_attn.q_proj.weight", 10**9)
    raw = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", 0) as reader:  # an error is the end
        while found := reader.read(1 << 12):
            raw += found
    lines = raw.decode().split("\r")
    assert lines[1].startswith("[#######")
    assert max(map(len, lines)) == longest
    assert lines[-2:] == [" " * longest, ""]


def test_options_expand_home_and_refuse_impossible_values(capsys, tmp_path, monkeypatch, target):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ["convert", str(target), str(tmp_path / "x"), "--tokenizer=~/here"]
    assert main(arguments) == 1
    assert f"{tmp_path / 'here'} holds no tokenizer.json" in capsys.readouterr().err
    assert main(["inspect", "~no_such_user/x"]) == 1
    for wrong in (["inspect", ""], ["compare", "a", "b", "--worst", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    err = capsys.readouterr().err
    assert "is empty; give a path" in err
    assert "is '-1'; expected a whole number" in err


def test_a_pipe_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    assert main(["inspect", str(tmp_path / "x.gguf")]) == 1
    assert "x.gguf is a pipe" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_copied_is_refused(capsys, tmp_path, target):
    place = str(tmp_path / "x.gguf")
    for source, layout, message in (
        (target, "huggingface", "is of no use here"),
        (TARGET, "gguf", "holds no tokenizer; give a target that does"),
        (DRAFTER, "gguf", "a target is needed here"),
    ):
        arguments = ["export", str(DRAFTER), place, "--format", layout, "--tokenizer", str(source)]
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


def test_an_interrupt_is_one_line_too(capsys, monkeypatch, target, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_jax.converters.convert.inventory", interrupted)
    assert main(["convert", str(target), str(tmp_path / "x")]) == 130
    assert capsys.readouterr().err == "\nconverters: interrupted\n"


def test_export_copies_a_targets_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 3])
    writer.add_eos_token_id(1)
    writer.add_int32("tokenizer.ggml.padding_token_id", -1)
    finish(writer)
    from dflash_jax.converters.export import Weights, export
    from dflash_jax.converters.models import open_model

    model = open_model(DRAFTER)
    weights = Weights(model.config, model.tensors, {}, open_gguf(tmp_path / "t.gguf").metadata)
    export(weights, tmp_path / "d.gguf", layout="gguf", dtype="bfloat16")
    found = open_gguf(tmp_path / "d.gguf").metadata
    assert found["tokenizer.ggml.tokens"].tolist() == ["a", "b"]
    assert found["tokenizer.ggml.eos_token_id"] == 1
    assert found["tokenizer.ggml.padding_token_id"] == -1
    assert found["tokenizer.ggml.mask_token_id"] == model.config.mask_token_id


TEMPLATE = {"tokenizer.chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("metadata", "file", "outcome"),
    [
        ({"general.name": "Qwen3 4B Instruct"} | TEMPLATE, "x.gguf", "ACCEPT"),
        ({"general.finetune": "it"} | TEMPLATE, "gemma.gguf", "ACCEPT"),
        ({}, "Llama-3.1-8B-Instruct-Q4_K_M.gguf", "UNKNOWN"),
        ({"general.name": "Qwen3 4B Base"} | TEMPLATE, "x.gguf", "REFUSE"),
        ({"general.name": "gemma pt"}, "x.gguf", "REFUSE"),
        ({"general.base_model.0.name": "Llama 3 8B base"} | TEMPLATE, "x.gguf", "REFUSE"),
        ({"general.base_model.0.name": "Llama 3 8B Instruct"} | TEMPLATE, "x.gguf", "UNKNOWN"),
        ({"general.name": "Qwen3 4B"} | TEMPLATE, "x.gguf", "UNKNOWN"),
        ({"general.name": "Qwen3 4B"}, "x.gguf", "REFUSE"),
        ({"general.name": "Qwen3 Instruct"} | TEMPLATE, "Qwen3-base.gguf", "UNKNOWN"),
    ],
)
def test_base_models_are_distinguished_from_tuned_ones(metadata, file, outcome):
    assert check_instruct(metadata, file).outcome == outcome


def test_check_instruct_refuses_base_models_and_truncated_files(capsys, tmp_path, target):
    assert main(["inspect", "--check-instruct", str(target)]) == 1
    assert capsys.readouterr().out.startswith("REFUSE")
    cut = tmp_path / "Model-it.gguf"
    cut.write_bytes(target.read_bytes()[:-5000])
    assert main(["inspect", "--check-instruct", str(cut)]) == 1
    assert "is truncated" in capsys.readouterr().err


def test_the_commands_run_in_a_separate_process(target):
    done = subprocess.run(
        [sys.executable, "-m", "converters", "inspect", target, "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["role"] == "target"


def test_a_process_with_a_closed_output_pipe_ends_quietly(target):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "converters", "inspect", target, "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_converters_import_nothing_that_computes():
    allowed = {"numpy", "ml_dtypes", *sys.stdlib_module_names}
    inside = ("dflash_jax.config", "dflash_jax.families", "dflash_jax.errors")
    inside += (
        "dflash_jax.checkpoint",
        "dflash_jax.kernels.native.interleaved",
        "dflash_jax.model_files",
        "dflash_jax.quant.formats",
        "dflash_jax.quant.layouts",
        "dflash_jax.tokenizer",
        "dflash_jax.utils.command",
        "dflash_jax.utils.atomic",
        "dflash_jax.utils.store",
        "dflash_jax.utils.progress",
    )
    inside += ("dflash_jax.utils.sources", "dflash_jax.converters")
    for path in (ROOT / "converters").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "dflash_jax":
                names += [f"dflash_jax.{a.name}" for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append(str(node.module))
            for name in names:
                fine = name.startswith(inside) or name.split(".")[0] in allowed
                assert fine, f"{path} imports {name}"
