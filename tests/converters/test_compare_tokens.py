"""`compare` judges tokenizers, special ids and chat templates, and each row of a matrix."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from weight_files import ORACLE

import dflash_jax as dj
from dflash_jax.cli import main
from dflash_jax.converters.compare import compare
from dflash_jax.converters.compare_tokens import differences
from dflash_jax.converters.convert import convert
from dflash_jax.converters.error_limits import LIMITS
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.models import open_model

TINY = Path(dj.__file__).parent / "data" / "tiny" / "target"
TARGET = ORACLE / "targets" / "llama3"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    convert(open_model(TINY), path, to="gguf", dtype="q8_0")
    return open_model(path)


def changed(folder: Path, name: str, change) -> Path:
    """A copy of the shipped target with one of its JSON files changed."""
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    fields = json.loads((TINY / name).read_text())
    (folder / name).unlink()
    change(fields)
    (folder / name).write_text(json.dumps(fields))
    return folder


def test_a_folder_and_its_file_agree(tiny_gguf):
    assert differences(open_model(TINY), tiny_gguf) == ([], [])
    assert differences(tiny_gguf, tiny_gguf) == ([], [])


def swapped_tokens(fields):
    vocabulary = fields["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def fewer_merges(fields):
    del fields["model"]["merges"][100:]


def no_normalizer(fields):
    fields["normalizer"] = {"type": "Lowercase"}


def a_start_token(fields):
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "!", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"!": {"id": "!", "ids": [0], "tokens": ["!"]}},
    }


def another_template(fields):
    fields["chat_template"] = fields["chat_template"].replace("user", "human") + "{{ 1 }}"


def no_template(fields):
    del fields["chat_template"]


def another_end(fields):
    fields["eos_token_id"] = 7


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer.json", swapped_tokens, r"2 tokens: \d+ is 'a' against 'b', \d+ is 'b' against"),
        ("tokenizer.json", fewer_merges, "ids of .Hello.*: .* against .* from token 0"),
        ("tokenizer.json", no_normalizer, "ids of .Hello"),
        ("tokenizer.json", a_start_token, "ids of ' a .* against 0, .* from token 0"),
        ("tokenizer_config.json", another_template, r"template from character \d+: .user.* .human"),
        ("tokenizer_config.json", no_template, r"chat template from character 0: '.*' against ''"),
        ("generation_config.json", another_end, r"end tokens: \[\d+, \d+\] against \[7, "),
    ],
)  # fmt: skip
def test_what_differs_is_named(tmp_path, tiny_gguf, name, change, message):
    other = open_model(changed(tmp_path, name, change))
    for first in (open_model(TINY), tiny_gguf):
        problems, notes = differences(first, other)
        assert [p for p in problems if re.search(message, p)], problems
        assert notes == []


def test_another_tokenizer_is_not_the_same_model(capsys, tmp_path):
    other = changed(tmp_path, "tokenizer.json", swapped_tokens)
    assert main(["compare", str(TINY), str(other)]) == 1
    printed = capsys.readouterr().out
    assert "tokenizers differ: 2 tokens" in printed
    assert "NOT the same model" in printed


def test_a_missing_tokenizer_is_noted(tmp_path):
    for file in TINY.iterdir():
        if "tokenizer" not in file.name:
            shutil.copy(file, tmp_path)
    found = compare(open_model(TINY), open_model(tmp_path))
    assert found.agree
    assert found.notes == (f"tokenizers are not compared: {tmp_path} has none",)


@pytest.mark.sample("Q4_0--1.0", "Q4_1-0.0", "Q8_0-2.0", "F16--1.0")
@pytest.mark.parametrize("factor", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_a_wrong_row_is_found_though_the_matrix_is_near(capsys, tmp_path, kind, factor):
    shutil.copytree(TARGET, tmp_path / "other")
    tensors = safetensors.numpy.load_file(TARGET / "model.safetensors")
    (name,) = (n for n in tensors if "embed_tokens" in n)
    tensors[name] = tensors[name].copy()
    tensors[name][17] *= np.asarray(factor, tensors[name].dtype)
    safetensors.numpy.save_file(tensors, tmp_path / "other" / "model.safetensors")
    convert(open_model(TARGET), tmp_path / "x.gguf", to="gguf", dtype=kind.lower())
    assert main(["compare", str(TARGET), str(tmp_path / "x.gguf")]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "other"), str(tmp_path / "x.gguf"), "--json"]) == 1
    worst = json.loads(capsys.readouterr().out)["tensors"][0]
    assert (worst["name"], worst["row"]) == ("embed_tokens.weight", 17)
    assert worst["verdict"] != "ok"
    assert main(["compare", str(tmp_path / "other"), str(tmp_path / "x.gguf")]) == 1
    assert "row 17 of 256: " in capsys.readouterr().out


def test_limits_of_rows_tell_a_negated_one_from_every_type():
    """The largest error of a row among real weights is 1.3 times the limit of a tensor."""
    for kind, limits in LIMITS.items():
        assert 1.3 * limits.fail < limits.row < 2, kind
    four_bits = [k for k in LIMITS if k in BY_NAME and "4" in k and not k.startswith(("F", "I8"))]
    assert max(LIMITS[kind].row for kind in four_bits) < 0.5
