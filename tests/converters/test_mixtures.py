"""Types of tensors in GGUF files that `convert --type` writes, and importance matrices."""

import json
import struct

import gguf
import numpy as np
import pytest
from gguf_models import write_target
from test_gguf_families import TARGETS

from dflash_jax.converters.cli import main
from dflash_jax.converters.compare import compare
from dflash_jax.converters.convert import Details, GgufOptions, convert, lines
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.formats.quants.encode import ENCODERS
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.forms import FILE_TYPES, GGUF_TYPES, TENSOR_TYPES
from dflash_jax.converters.gguf.importance import MeasuredInputs, read_importance
from dflash_jax.converters.gguf.mixtures import MIXTURES, Choice, choose
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.testing import tiny_target

LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def types_of(kind: str, layers: int = 28, width: int = 1536, *, tied: bool = False, **choices):
    """Types by tensor of a dense model with two query heads a key, and those of others."""
    heads = choices.pop("heads", 2)
    config = tiny_target(num_layers=layers, num_heads=heads, num_kv_heads=1)
    names = [f"blk.{i}.{part}.weight" for i in range(layers) for part in LAYER]
    names += ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"]
    shapes = dict.fromkeys(names, (64, width)) | {"blk.0.attn_norm.weight": (width,)}
    return {n: c.kind.name for n, c in choose(shapes, config, Choice(kind, **choices)).items()}


def layers_with(found: dict[str, str], part: str, kind: str) -> list[int]:
    return [int(n.split(".")[1]) for n, k in found.items() if f".{part}." in n and k == kind]


SPREAD = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]  # of 28: outer eighths, every third


def test_medium_mixtures_give_six_bits_to_values_and_down_projections_here_and_there():
    for kind, base in (("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")):
        found = types_of(kind)
        for part in LAYER:
            spread = part in ("attn_v", "ffn_down")
            assert layers_with(found, part, "Q6_K") == (SPREAD if spread else []), part
            assert len(layers_with(found, part, base)) == (14 if spread else 28), part
        assert found["output.weight"] == "Q6_K"
        assert found["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("kind", "part", "expected"),
    [
        ("q4_k_s", "attn_v", {"Q5_K": [0, 1, 2, 3]}),
        ("q4_k_s", "ffn_down", {"Q5_K": [0, 1, 2]}),
        ("q3_k_m", "attn_v", {"Q5_K": [0, 1], "Q3_K": []}),
        ("q3_k_m", "ffn_down", {"Q5_K": [0], "Q3_K": []}),
        ("q3_k_m", "attn_output", {"Q3_K": []}),
        ("q3_k_m", "ffn_up", {"Q3_K": [*range(28)]}),
        ("q2_k", "ffn_down", {"Q3_K": [*range(28)]}),
        ("q2_k", "attn_v", {"Q3_K": [*range(28)]}),
        ("iq4_xs", "ffn_down", {"Q5_K": [0, 1, 2]}),
        ("iq4_xs", "attn_v", {"Q5_K": []}),
        ("mxfp4", "ffn_down", {"MXFP4": [*range(28)]}),
    ],
)
def test_each_mixture_gives_more_bits_where_llama_cpp_does(kind, part, expected):
    found = types_of(kind)
    for name, layers in expected.items():
        assert layers_with(found, part, name) == layers


def test_values_shared_by_many_heads_have_more_bits():
    found = types_of("q2_k", heads=4)
    assert layers_with(found, "attn_v", "Q4_K") == [*range(28)]
    assert layers_with(types_of("iq4_xs", heads=4), "attn_v", "Q5_K") == [*range(28)]


def test_four_bit_files_keep_embedding_and_head_in_six_or_eight():
    for kind in ("q4_0", "q4_1", "q4_k_m", "q4_k_s", "iq4_nl", "iq4_xs"):
        found = types_of(kind)
        assert (found["token_embd.weight"], found["output.weight"]) == ("Q6_K", "Q6_K"), kind
        assert types_of(kind, tied=True, width=576)["token_embd.weight"] == "Q8_0", kind
    assert types_of("q2_k")["token_embd.weight"] == "Q2_K"
    assert types_of("q2_k", tied=True)["token_embd.weight"] == "Q6_K"


def test_chosen_types_of_head_and_embedding_come_first():
    found = types_of("q4_k_m", head="q8_0", embedding="q5_1")
    assert (found["token_embd.weight"], found["output.weight"]) == ("Q5_1", "Q8_0")
    assert types_of("q4_k_m", tied=True, head="q4_0")["token_embd.weight"] == "Q4_0"


def test_an_importance_matrix_changes_which_down_projections_have_more_bits():
    assert layers_with(types_of("iq4_xs", steered=True), "ffn_down", "Q5_K") == []
    assert layers_with(types_of("q4_0", steered=True), "ffn_down", "Q4_1") == [0, 1, 2]
    assert layers_with(types_of("q4_0"), "ffn_down", "Q4_1") == []


@pytest.mark.parametrize(
    ("kind", "narrow"),
    [("q6_k", "Q8_0"), ("q5_k_s", "Q5_1"), ("q4_k_s", "Q5_0"), ("q3_k_s", "IQ4_NL"),
     ("q2_k", "IQ4_NL"), ("iq4_xs", "IQ4_NL")],
)  # fmt: skip
def test_rows_that_256_does_not_divide_have_a_type_of_32(kind, narrow):
    assert types_of(kind, width=576)["blk.20.ffn_up.weight"] == narrow
    assert types_of(kind, width=580)["blk.20.ffn_up.weight"] == "F16"


def test_every_type_has_a_mixture_a_number_and_encoders():
    assert set(MIXTURES) == set(GGUF_TYPES)
    numbers = {f"MOSTLY_{name.upper()}": number for name, number in FILE_TYPES.items()}
    theirs = {each.name: each.value for each in gguf.LlamaFileType}
    theirs["MOSTLY_MXFP4"] = theirs.get("MOSTLY_MXFP4_MOE", 38)
    theirs["MOSTLY_F32"] = theirs["ALL_F32"]
    assert numbers == {name: theirs[name] for name in numbers}
    for name in TENSOR_TYPES:
        kind = BY_NAME[name.upper()]
        assert kind.dtype is not None or kind.name in ENCODERS


@pytest.mark.parametrize("kind", ["q5_k_m", "q4_k_m", "iq4_nl", "q2_k", "mxfp4", "q5_1"])
def test_a_written_mixture_is_the_model_within_the_errors_of_its_types(tmp_path, kind):
    folder = open_model(TARGETS / "qwen3")
    report = convert(folder, tmp_path / "x.gguf", to="gguf", dtype=kind)
    assert compare(folder, open_model(tmp_path / "x.gguf")).agree
    assert len(list(tmp_path.iterdir())) == 1
    stored = open_gguf(tmp_path / "x.gguf")
    assert stored.metadata["general.file_type"] == FILE_TYPES[kind]
    counted = {kind: 0 for kind in report["written"]}
    for name in stored.names():
        counted[stored.kind(name)] += 1
    assert counted == report["written"]


def test_the_report_counts_rows_that_are_not_divided_by_reason(tmp_path):
    report = convert(open_model(TARGETS / "qwen3"), tmp_path / "x.gguf", to="gguf", dtype="q4_k_m")
    about = [line for line in lines(report) if "are not divided" in line]
    assert len(about) == len(set(report["fallbacks"].values())) == 4  # two types, two widths
    assert any(" more are Q5_0: rows of" in line for line in about)


def test_weights_that_were_quantised_before_are_noted(tmp_path):
    def noted(source, name: str, kind: str) -> str:
        found = convert(open_model(source), tmp_path / name, to="gguf", dtype=kind)["notes"]
        return "; ".join(note for note in found if "add up" in note)

    assert noted(TARGETS / "qwen3", "x.gguf", "q5_1") == ""
    assert "were in Q8_0, Q5_1 before" in noted(tmp_path / "x.gguf", "y.gguf", "q4_0")
    assert noted(tmp_path / "x.gguf", "z.gguf", "f16") == ""


# Importance matrices.


def measured(source, *, experts: int = 1, seed: int = 0) -> MeasuredInputs:
    """One that fits the matrices of a file's layers."""
    rng = np.random.default_rng(seed)
    shapes = {n: source.shape(n) for n in source.names() if len(source.shape(n)) > 1}
    sums = {
        name: np.exp(rng.standard_normal((int(np.prod(shape[:-2], initial=1)), shape[-1])))
        for name, shape in shapes.items()
        if name.startswith("blk.")
    }
    counts = {name: np.full((len(each), 1), 8.0) for name, each in sums.items()}
    return MeasuredInputs(sums, counts, "some text.txt", 2, 4)


@pytest.fixture
def written(tmp_path):
    return write_target(TARGETS / "qwen3", tmp_path / "source.gguf")


@pytest.mark.parametrize("older", [False, True])
def test_an_importance_matrix_is_read_as_it_was_written(tmp_path, written, older):
    made = measured(open_gguf(written))
    with (tmp_path / "m").open("wb") as file:
        made.write(file, older=older)
    found = read_importance(tmp_path / "m")
    assert (found.text, found.chunks) == ("some text.txt", 2)
    assert found.means.keys() == made.sums.keys()
    for name, means in found.means.items():
        np.testing.assert_allclose(means.reshape(1, -1), made.sums[name] / 8, 1e-6)


def test_the_older_format_is_llama_cpps(tmp_path):
    """Fields as its `save_imatrix` writes them: means times calls."""
    name = b"blk.0.attn_q.weight"
    raw = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii2f", 4, 2, 12, 20)
    (tmp_path / "old.dat").write_bytes(raw)
    found = read_importance(tmp_path / "old.dat")
    np.testing.assert_array_equal(found.means["blk.0.attn_q.weight"], [3, 5])
    (tmp_path / "new.dat").write_bytes(raw + struct.pack("<ii", 4, 5) + b"a.txt")
    assert read_importance(tmp_path / "new.dat").text == "a.txt"


def test_errors_move_to_inputs_that_count_less(tmp_path, written):
    made = measured(open_gguf(written))
    with (tmp_path / "m.gguf").open("wb") as file:
        made.write(file, older=False)
    model, exact, errors = open_model(written), open_gguf(written), {}
    for chosen in (None, tmp_path / "m.gguf"):
        place = tmp_path / f"{chosen is None}.gguf"
        convert(
            model, place, to="gguf", dtype="q4_0", details=Details(gguf=GgufOptions(imatrix=chosen))
        )
        quantised = open_gguf(place)
        squares = [
            (made.sums[name] * np.square(quantised.read(name) - exact.read(name))).sum()
            for name in made.sums
        ]
        errors[chosen is None] = sum(squares)
    assert errors[False] < 0.95 * errors[True]


def test_each_expert_of_a_stack_has_its_own_importance(tmp_path):
    convert(open_model(TARGETS / "qwen3_moe"), tmp_path / "x.gguf", to="gguf", dtype="f32")
    exact = open_gguf(tmp_path / "x.gguf")
    made = measured(exact)
    stacks = [name for name in made.sums if "_exps" in name]
    for name in stacks:  # the last expert was never chosen
        made.sums[name][-1] = made.counts[name][-1] = 0
    with (tmp_path / "m.gguf").open("wb") as file:
        made.write(file, older=False)
    steered = read_importance(tmp_path / "m.gguf").of({n: exact.shape(n) for n in exact.names()})
    for name in stacks:
        assert steered[name].shape == made.sums[name].shape
        np.testing.assert_allclose(steered[name].mean(axis=1), 1, 1e-3)
        np.testing.assert_array_equal(steered[name][-1], 1)
    source = open_model(tmp_path / "x.gguf")
    chosen = Details(gguf=GgufOptions(imatrix=tmp_path / "m.gguf"))
    convert(source, tmp_path / "y.gguf", to="gguf", dtype="q4_1", details=chosen)
    assert compare(source, open_model(tmp_path / "y.gguf")).agree


def test_the_older_format_leaves_out_stacks_with_experts_that_were_not_chosen(tmp_path):
    made = MeasuredInputs(
        {"a.weight": np.ones((2, 4)), "b.weight": np.ones((1, 4))},
        {"a.weight": np.array([[1.0], [0.0]]), "b.weight": np.array([[1.0]])},
        "x",
        1,
        4,
    )
    with (tmp_path / "m").open("wb") as file:
        made.write(file, older=True)
    assert list(read_importance(tmp_path / "m").means) == ["b.weight"]


def another(names: dict[str, np.ndarray]) -> MeasuredInputs:
    return MeasuredInputs(names, {n: np.ones((len(a), 1)) for n, a in names.items()}, "x", 1, 1)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (
            {"blk.99.attn_q.weight": np.ones((1, 64))},
            "blk.99.attn_q.weight, which this model lacks",
        ),
        ({"output_norm.weight": np.ones((1, 64))}, "output_norm.weight, which this model lacks"),
        ({"blk.0.attn_q.weight": np.ones((1, 7))}, "7 numbers for blk.0.attn_q.weight"),
        ({"blk.0.attn_q.weight": -np.ones((1, 64))}, "negative or not finite"),
        ({"blk.0.attn_q.weight": np.full((1, 64), np.nan)}, "negative or not finite"),
        ({}, "has no measured matrices"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_a_matrix_of_another_model_is_refused_by_name(tmp_path, written, sums, message, older):
    with (tmp_path / "m").open("wb") as file:
        another(sums).write(file, older=older)
    with pytest.raises(CheckpointError, match=message):
        convert(
            open_model(written), tmp_path / "x.gguf", to="gguf", dtype="q4_0",
            details=Details(gguf=GgufOptions(imatrix=tmp_path / "m")),
        )  # fmt: skip
    assert not (tmp_path / "x.gguf").exists()


def test_files_that_are_no_importance_matrices_are_refused(tmp_path, written):
    for name, raw in {
        "empty": b"",
        "words": b"these are words and no numbers at all",
        "cut": struct.pack("<ii", 2, 5) + b"blk.0",
        "count": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 1 << 27),
    }.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"no importance matrix|is empty"):
            read_importance(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a GGUF file of a model, not an importance"):
        read_importance(written)
    with pytest.raises(CheckpointError, match="missing"):
        read_importance(tmp_path / "missing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "safetensors", "--output-type", "q6_k"], "--output-type q6_k is of no use"),
        (["--to", "orbax", "--imatrix", "m"], "--imatrix m is of no use for orbax"),
        (["--to", "gguf", "--type", "f16", "--imatrix", "m"], "not quantised"),
        (["--to", "gguf", "--type", "q4_k"], "'q4_k' is not one of f32, f16"),
        (["--to", "gguf", "--type", "q4_0", "--imatrix", "missing.dat"], "missing.dat"),
    ],
)
def test_options_of_no_use_are_named(tmp_path, capsys, options, message):
    place = tmp_path / ("x.gguf" if "gguf" in options else "x")
    assert main(["convert", str(TARGETS / "qwen3"), str(place), *options]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_types_of_tensors_are_checked_and_reported(tmp_path, capsys):
    with pytest.raises(ConfigError, match="the output type 'q4_k_m' is not one of"):
        convert(
            open_model(TARGETS / "qwen3"), tmp_path / "x.gguf", to="gguf", dtype="q4_0",
            details=Details(gguf=GgufOptions(output_type="q4_k_m")),
        )  # fmt: skip
    words = [str(TARGETS / "qwen3"), str(tmp_path / "x.gguf"), "--type", "Q8_0", "--json"]
    assert main(["convert", *words, "--output-type", "Q5_0"]) == 0
    assert json.loads(capsys.readouterr().out)["written"]["Q5_0"] == 1
