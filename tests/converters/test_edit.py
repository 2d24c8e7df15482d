"""Metadata of GGUF files are changed, and their weights and other files stay as they are."""

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_jax.converters import edit as module
from dflash_jax.converters.cli import main
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.gguf.split import part_path

ROOT = Path(__file__).resolve().parents[2]
EOS = "tokenizer.ggml.eos_token_id"
PADDING = ("--special-token-by-id", "padding", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "tiny.gguf"
    assert main(["convert", "tiny", str(path)]) == 0
    return path


@pytest.fixture
def file(made, tmp_path):
    return Path(shutil.copyfile(made, tmp_path / "x.gguf"))


def edit(file, *arguments) -> int:
    return main(["edit", str(file), *map(str, arguments)])


def values(file) -> dict:
    """The metadata as the gguf package reads them, without the vocabulary."""
    fields = gguf.GGUFReader(file).fields.values()
    return {x.name: (x.types, x.contents()) for x in fields if len(x.data) < 1000}


def weights(file) -> dict:
    return {t.name: t.data.tobytes() for t in gguf.GGUFReader(file).tensors}


def test_a_special_token_is_changed_in_the_file_itself(capsys, file, made):
    before = (file.stat().st_ino, file.read_bytes())
    assert edit(file, "--special-token", "eos", "<|endoftext|>") == 0
    assert "1 bytes in the file itself" in capsys.readouterr().out
    assert file.stat().st_ino == before[0]
    changed = [
        i for i, (a, b) in enumerate(zip(before[1], file.read_bytes(), strict=True)) if a != b
    ]
    assert len(changed) == 1
    assert open_gguf(file).metadata[EOS] == open_gguf(file).metadata[
        "tokenizer.ggml.tokens"
    ].tolist().index("<|endoftext|>")
    assert edit(file, "--special-token-by-id", "eos", open_gguf(made).metadata[EOS]) == 0
    assert file.read_bytes() == before[1]


def test_longer_values_are_written_by_a_copy_that_keeps_all_else(file):
    before, tensors = values(file), weights(file)
    file.chmod(0o640)
    options = ["--name", "A model", "--license", "mit", "--set", 'general.tags=["a", "b"]']
    options += ["--chat-template", "{{ messages[0].content }}", "--set", "x.y=u8:7"]
    options += ["--remove", "tokenizer.ggml.add_bos_token", "--set", "x.z=-1", "--set", "x.w=1e3"]
    assert edit(file, *options) == 0
    after = values(file)
    kind = gguf.GGUFValueType
    wanted = {
        "general.name": ([kind.STRING], "A model"),
        "general.license": ([kind.STRING], "mit"),
        "general.tags": ([kind.ARRAY, kind.STRING], ["a", "b"]),
        "tokenizer.chat_template": ([kind.STRING], "{{ messages[0].content }}"),
        "x.y": ([kind.UINT8], 7),
        "x.z": ([kind.INT32], -1),
        "x.w": ([kind.FLOAT32], 1000.0),
    }
    del before["tokenizer.ggml.add_bos_token"]
    del before["GGUF.kv_count"], after["GGUF.kv_count"]
    assert after == before | wanted
    assert weights(file) == tensors
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_key_keeps_its_type(file):
    before = values(file)
    assert edit(file, "--set", f"{EOS}=3", "--set", "tokenizer.ggml.add_bos_token=true") == 0
    after = values(file)
    assert {key for key in after if after[key] != before[key]} == {
        EOS,
        "tokenizer.ggml.add_bos_token",
    }
    assert after[EOS] == (before[EOS][0], 3)
    assert after["tokenizer.ggml.add_bos_token"][1] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to change"),
        (["--special-token", "eos", "nix"], "has no token 'nix'"),
        (["--special-token", "end", "<|im_end|>"], "'end' is no special token; known are bos"),
        (["--special-token-by-id", "eos", "2048"], "has 2048 tokens, numbered from 0"),
        (["--special-token-by-id", "eos", "-1"], "expected a whole number from 0"),
        (["--set", f"{EOS}=x"], "expected a value of the type u32"),
        (["--set", f"{EOS}=str:x"], "is u32 in this file and not str"),
        (["--set", f"{EOS}=99999999999"], "expected a value of the type u32"),
        (["--set", "general.alignment=64"], "says how"),
        (["--set", "split.count=2"], "use `split` or `merge`"),
        (["--set", "tokenizer.ggml.tokens=[]"], "belongs to the vocabulary"),
        (["--set", "x.y"], "expected KEY=VALUE"),
        (["--set", "=1"], "is empty, unprintable"),
        (["--set", "a\nb=1"], "is empty, unprintable"),
        (["--set", "x.y=u8:256"], "expected a value of the type u8"),
        (["--set", "x.y=f64:1e999"], "expected a value of the type f64"),
        (["--set", "x.y=[NaN]"], "expected a value of the type f32"),
        (["--set", 'x.y=["a", 1]'], "values of one type"),
        (["--set", "x.y=int:1e400"], "whole number of at most 64 bits"),
        (["--set", "x.y=a\udcff"], "is not UTF-8"),
        (["--name", "a", "--set", "general.name=b"], "is given twice"),
        (["--special-token-by-id", "pad", "1", *PADDING], "padding_token_id is given twice"),
        (["--special-token", "pad", "<|im_end|>", *PADDING], "is given twice"),
        (["--set", "tokenizer.ggml.padding_token_id=1", *PADDING], "is given twice"),
        (["--special-token-by-id", "eos", "9" * 5000], "expected a value of the type u32"),
        (["--name", "a", "--overwrite"], "--overwrite is for --output NEW"),
        (["--remove", "block_count"], "did you mean"),
        (["--chat-template", "{% if %}"], "the new chat template does not work"),
        (["--chat-template", ""], "give --remove tokenizer.chat_template"),
        (["--chat-template-file", "none.jinja"], "cannot be read"),
        (["--set", "general.architecture=gpt9"], "could not be used any more"),
        (["--set", "{}.block_count=2"], "could not be used any more"),
    ],
)
def test_wrong_changes_are_named_and_leave_the_file_alone(capsys, file, options, message):
    raw = file.read_bytes()
    own = open_gguf(file).metadata["general.architecture"]
    options = [option.replace("{}.", f"{own}.") for option in options]
    assert edit(file, *options) == 1
    assert message in capsys.readouterr().err
    assert file.read_bytes() == raw
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_files_that_are_no_gguf_are_named(capsys, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "x.txt").write_text("a text of more than 24 bytes")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in {
        "": "is a folder, whose metadata are texts",
        "none.gguf": "give a weight file that exists",
        "none": "give a weight file that exists",
        "x.txt": "the file is damaged or not GGUF",
        "pipe.gguf": "is a pipe",
        "x.gguf": "the file is damaged or not GGUF",
    }.items():
        assert edit(tmp_path / name, "--name", "x") == 1
        assert message in capsys.readouterr().err


def test_equal_values_write_nothing(capsys, file):
    before = file.stat()
    assert edit(file, "--set", f"{EOS}={open_gguf(file).metadata[EOS]}") == 0
    assert "nothing changes" in capsys.readouterr().out
    assert file.stat() == before


def test_a_dry_run_and_an_output_leave_the_file_alone(capsys, file, tmp_path):
    raw = file.read_bytes()
    file.chmod(0o444)
    assert edit(file, "--name", "Other", "--dry-run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["changes"] == [{"key": "general.name", "before": "nothing", "after": "'Other'"}]
    assert edit(file, "--name", "Other", "--output", tmp_path / "new.gguf") == 0
    assert open_gguf(tmp_path / "new.gguf").metadata["general.name"] == "Other"
    capsys.readouterr()
    for options, message in (
        (["--output", tmp_path / "new.gguf"], "exists"),
        (["--output", file], "is the file itself"),
        (["--output", tmp_path / "new"], "ends in .gguf"),
        ([], "is read-only"),
    ):
        assert edit(file, "--name", "Third", *options) == 1
        assert message in capsys.readouterr().err
    assert file.read_bytes() == raw
    assert open_gguf(tmp_path / "new.gguf").metadata["general.name"] == "Other"


def test_links_are_followed_but_not_into_caches_and_other_names_keep_their_file(capsys, file):
    raw = file.read_bytes()
    blobs = file.parent / "blobs"
    blobs.mkdir()
    (blobs / "ab12").write_bytes(raw)
    (file.parent / "cached.gguf").symlink_to("blobs/ab12")
    assert edit(file.parent / "cached.gguf", "--special-token-by-id", "eos", 3) == 1
    assert "give --output NEW.gguf" in capsys.readouterr().err
    assert (blobs / "ab12").read_bytes() == raw
    os.link(file, file.parent / "backup")
    (file.parent / "link.gguf").symlink_to(file)
    assert edit(file.parent / "link.gguf", "--special-token-by-id", "eos", 3) == 0
    assert (file.parent / "link.gguf").is_symlink()
    assert open_gguf(file).metadata[EOS] == 3
    assert (file.parent / "backup").read_bytes() == raw


def test_a_file_that_is_read_meanwhile_stays_whole_for_its_reader(file):
    raw = file.read_bytes()
    with file.open("rb") as reader:
        assert edit(file, "--name", "x" * 5000) == 0
        assert reader.read() == raw


def test_two_editors_do_not_meet(capsys, file):
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert edit(file, "--name", "x") == 1
    assert "is being edited by another process" in capsys.readouterr().err


def test_what_changes_between_reading_and_writing_is_not_overwritten(capsys, file, monkeypatch):
    write = module._write_inside

    def changed(path, start, new, old):
        write(path, start, b"\x09", old)
        write(path, start, new, old)

    monkeypatch.setattr(module, "_write_inside", changed)
    assert edit(file, "--special-token-by-id", "eos", 3) == 1
    assert "has changed meanwhile" in capsys.readouterr().err


def test_a_killed_edit_leaves_the_old_file(file):
    raw = file.read_bytes()
    code = (
        "import os, signal, sys\n"
        "from dflash_jax.converters import cli, edit\n"
        "def end(file, *a, **b):\n"
        "    file.write(b'GGUF half')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "edit.write_gguf = end\n"
        f"cli.main(['edit', {str(file)!r}, '--name', 'x'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert file.read_bytes() == raw
    assert edit(file, "--name", "x") == 0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_full_disk_leaves_the_old_file(capsys, file, monkeypatch):
    raw = file.read_bytes()
    usage = shutil.disk_usage(file)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert edit(file, "--name", "x") == 1
    assert "has 0.0 MB free" in capsys.readouterr().err
    assert file.read_bytes() == raw


def test_sets_are_those_of_gguf_split_and_merge_to_the_same_bytes(capsys, file, tmp_path):
    assert main(["split", str(file), str(tmp_path / "s"), "--max-size", "1MB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    count = len(report["parts"])
    assert count > 2
    paths = [part_path(tmp_path / "s", i + 1, count) for i in range(count)]
    assert [entry["path"] for entry in report["parts"]] == [*map(str, paths)]
    assert paths[0].name == f"s-00001-of-{count:05d}.gguf"
    total = len(open_gguf(file).names())
    for number, path in enumerate(paths):
        reader = gguf.GGUFReader(path)
        kind = gguf.GGUFValueType
        for key, wanted in {
            "split.no": (kind.UINT16, number),
            "split.count": (kind.UINT16, count),
            "split.tensors.count": (kind.INT32, total),
        }.items():
            field = reader.fields[key]
            assert (field.types[0], field.contents()) == wanted
        assert ("general.architecture" in reader.fields) == (number == 0)
        assert len(reader.tensors) == 1 or path.stat().st_size < 1_001_000
    assert main(["compare", str(file), str(paths[0])]) == 0
    assert main(["merge", str(paths[0]), str(tmp_path / "m.gguf")]) == 0
    assert (tmp_path / "m.gguf").read_bytes() == file.read_bytes()


def test_a_set_is_edited_by_its_first_file(capsys, file, tmp_path):
    assert main(["split", str(file), str(tmp_path / "s.gguf"), "--no-tensor-first-split"]) == 0
    first, second = (part_path(tmp_path / "s", i, 2) for i in (1, 2))
    before = second.read_bytes()
    assert gguf.GGUFReader(first).tensors == []
    assert edit(first, "--name", "Set") == 0
    assert open_gguf(first).metadata["general.name"] == "Set"
    assert second.read_bytes() == before
    assert edit(second, "--name", "Set") == 1
    assert edit(first, "--name", "Other", "--output", tmp_path / "n.gguf") == 1
    assert "which a copy of it alone would not find" in capsys.readouterr().err
    assert not (tmp_path / "n.gguf").exists()


def test_what_cannot_be_divided_or_joined_is_named_and_nothing_is_written(capsys, file, tmp_path):
    split = ["split", str(file), str(tmp_path / "s"), "--max-tensors", "60"]
    assert main([*split, "--dry-run"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert main(split) == 0
    first = part_path(tmp_path / "s", 1, 2)
    raw = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    for command, message in (
        (split, "exists; choose another name, or remove the old set"),
        (["merge", file, tmp_path / "m.gguf"], "is one file and no set"),
        (["merge", first, first, "--overwrite"], "which would be lost"),
        (["merge", part_path(tmp_path / "s", 2, 2), tmp_path / "m.gguf"], "not the first"),
        (["merge", first, file], "exists"),
        (["merge", first, tmp_path / "m.bin"], "ends in .gguf"),
        (["merge", first, tmp_path / "none" / "m.gguf"], "create it first"),
        (["split", file, tmp_path / "none" / "s"], "create it first"),
    ):
        assert main([*map(str, command)]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["split", str(file), str(tmp_path / "t"), "--max-size", "2 bananas"])
    assert "expected a size such as 5GB" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == raw


def test_alignments_other_than_32_stay(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(128)
    for name in "ab":
        writer.add_tensor(name, np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = weights(tmp_path / "a.gguf")
    assert main(["split", str(tmp_path / "a.gguf"), str(tmp_path / "s"), "--max-tensors", "1"]) == 0
    assert weights(part_path(tmp_path / "s", 2, 2)) == {"b": raw["b"]}
    merged = tmp_path / "m.gguf"
    assert main(["merge", str(part_path(tmp_path / "s", 1, 2)), str(merged)]) == 0
    assert edit(merged, "--name", "a name that does not fit" * 9) == 0
    assert weights(merged) == raw
