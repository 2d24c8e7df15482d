"""Metadata of GGUF files survive folders, as far as the folder stays as it was made."""

import json
from pathlib import Path

import pytest

from dflash_jax.converters.cli import main
from dflash_jax.converters.formats.gguf.file import GgufArray, open_gguf
from dflash_jax.converters.formats.gguf.writer import stored_keys
from dflash_jax.converters.kept_metadata import FILE

MORE = [
    "general.name=A name",
    'general.tags=["a", "b"]',
    "general.base_model.count=1",
    "general.quantized_by=somebody",
    "tokenizer.ggml.add_sep_token=false",
    "tokenizer.ggml.add_eos_token=false",
    "tokenizer.ggml.eot_token_id=3",
    "tokenizer.ggml.fim_pre_token_id=4",
    "other.key=u64:5",
    "other.share=f64:0.1",
]


def keys(path) -> dict:
    """The metadata of a file, with their types."""
    return {
        key: (item.kind, item.value.tolist() if isinstance(item.value, GgufArray) else item.value)
        for key, item in stored_keys(open_gguf(path).shards[0].header).items()
    }


def convert(*arguments) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "tiny.gguf"
    convert("tiny", path)
    own = open_gguf(path).metadata["general.architecture"]
    sets = [x for entry in (*MORE, f"{own}.own_key=7") for x in ("--set", entry)]
    assert main(["edit", str(path), *sets]) == 0
    return path


@pytest.fixture
def folder(made, tmp_path):
    convert(made, tmp_path / "folder")
    return tmp_path / "folder"


def back(folder) -> dict:
    convert(folder, folder.parent / "back.gguf", "--overwrite")
    return keys(folder.parent / "back.gguf")


@pytest.mark.parametrize("form", ["safetensors", "orbax", "gguf"])
def test_every_key_survives_every_form_with_its_type(made, tmp_path, form):
    between = tmp_path / ("x.gguf" if form == "gguf" else "x")
    convert(made, between, "--to", form)
    if form == "safetensors":
        assert main(["export", str(between), str(tmp_path / "y")]) == 0
        between = tmp_path / "y"
    convert(between, tmp_path / "z.gguf")
    assert keys(tmp_path / "z.gguf") == keys(made)


def test_a_new_template_in_a_folder_wins_and_flags_stay(made, folder):
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": "new"}))
    before, after = keys(made), back(folder)
    assert after.pop("tokenizer.chat_template") == (8, "new")
    del before["tokenizer.chat_template"]
    assert after == before
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    assert back(folder) == before


def test_flags_of_another_tokenizer_are_not_kept(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    found = back(folder)
    assert "tokenizer.ggml.add_sep_token" not in found
    assert found["general.name"] == (8, "A name")


def test_keys_of_another_configuration_are_not_kept(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"max_position_embeddings": 99}))
    found = back(folder)
    assert not [key for key in found if key.endswith("own_key") or key.startswith("other.")]
    assert found["tokenizer.ggml.add_sep_token"] == (7, False)


def test_names_and_licences_are_given_on_the_way(folder, tmp_path):
    labels = ["--name", "Other", "--license", "mit"]
    wanted = {"general.name": (8, "Other"), "general.license": (8, "mit")}
    convert(folder, tmp_path / "a.gguf", *labels)
    convert("tiny", tmp_path / "b", *labels)
    convert(tmp_path / "b", tmp_path / "b.gguf")
    command = ["export", "tiny/drafter", str(tmp_path / "c.gguf"), "--format", "gguf"]
    assert main([*command, "--tokenizer", str(folder), *labels]) == 0
    for name in "abc":
        found = keys(tmp_path / f"{name}.gguf")
        assert {key: found[key] for key in wanted} == wanted
    assert "general.tags" not in keys(tmp_path / "c.gguf")  # of its target
    assert keys(tmp_path / "a.gguf")["general.tags"] == (8, ["a", "b"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no 'keys'"),
        ('{"keys": {"x.y": {"type": "u9", "value": 1}}}', "expected a type, one of str, bool"),
        ('{"keys": {"x.y": {"type": "u8", "value": 256}}}', "and a value of it"),
        ('{"keys": {"x.y": {"type": "u8", "value": true}}}', "and a value of it"),
        ('{"keys": {"x.y": 1}}', "and a value of it"),
    ],
)
def test_damaged_files_are_named(capsys, folder, content, message):
    (folder / FILE).write_text(content)
    assert main(["convert", str(folder), str(folder.parent / "x.gguf")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert FILE in error
    assert not Path(folder.parent / "x.gguf").exists()
