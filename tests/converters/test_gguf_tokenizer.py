import itertools
import json
import random
import re

import gguf
import pytest
import tokenizers
from gguf_families import write_family
from gguf_models import finish
from tokenizers.pre_tokenizers import ByteLevel
from weight_files import ORACLE

import dflash_jax as dj
from dflash_jax.cli import main
from dflash_jax.converters.export import Weights, export
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.formats.gguf.writer import write_gguf
from dflash_jax.converters.gguf import tokenizer as rebuilding
from dflash_jax.converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from dflash_jax.converters.gguf.tokenizer import stop_ids, tokenizer_files
from dflash_jax.converters.gguf.tokenizer_export import tokenizer_metadata
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_target
from dflash_jax.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! it's 12345 o'clock\n\n  indented\tTABS",
    "def f(x):\r\n    return x**2  # ünïcödé 漢字 🎉 e\u0301",
    "We'LL SEE   trailing   ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def trained(pre: str = "qwen2") -> tokenizers.Tokenizer:
    """A byte-level BPE as Hugging Face ships them, trained on the texts above."""
    how = PRE_TOKENIZERS[pre]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=how.whole_words))
    core.normalizer = tokenizers.normalizers.NFC() if how.composed else None
    splits = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in how.patterns
    ]
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*splits, bytes_])
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    core.add_special_tokens(SPECIALS)
    core.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return core


def write(path, core: tokenizers.Tokenizer, pre: str, **changes):
    """Its vocabulary as llama.cpp's converter stores it, padded with unused entries."""
    size = core.get_vocab_size(with_added_tokens=True)
    tokens = [core.id_to_token(i) for i in range(size)]
    kinds = [3 if t in SPECIALS else 4 if t == "<think>" else 1 for t in tokens]
    for i in range(3):
        tokens.append(f"[PAD{size + i}]")
        kinds.append(5)
    merges = [" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "qwen3"))
    writer.add_tokenizer_model(changes.pop("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(changes.pop("tokens", tokens))
    writer.add_token_types(changes.pop("kinds", kinds))
    writer.add_token_merges(changes.pop("merges", merges))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    for key, value in changes.items():
        getattr(writer, key)(value)
    finish(writer)
    return open_gguf(path).metadata


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "llama-bpe", "gpt-4o", "smollm", "tekken"])
def test_a_rebuilt_tokenizer_encodes_as_the_original(tmp_path, pre):
    core = trained(pre)
    metadata = write(tmp_path / "x.gguf", core, pre, add_add_bos_token=False)
    rebuilt = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    for text in TEXTS:
        ids = core.encode(text).ids
        assert rebuilt.encode(text).ids == ids
        assert rebuilt.decode(ids) == core.decode(ids)
    think = core.token_to_id("<think>")
    assert rebuilt.encode("a<think>").ids[-1] == think
    assert rebuilt.decode([think]) == "<think>"


def test_the_start_token_is_added_where_the_file_asks_for_it(tmp_path):
    core = trained("llama-bpe")
    metadata = write(tmp_path / "x.gguf", core, "llama-bpe")
    files = tokenizer_files(metadata)
    rebuilt = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    start = core.token_to_id("<|endoftext|>")
    assert rebuilt.encode("Hello").ids == [start, *core.encode("Hello").ids]
    assert rebuilt.encode("Hello", add_special_tokens=False).ids == core.encode("Hello").ids
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["bos_token"] == "<|endoftext|>"
    assert settings["add_bos_token"] is True


def test_end_tokens_are_completed_by_family(tmp_path):
    core = trained()
    metadata = write(tmp_path / "x.gguf", core, "qwen2")
    expected = [core.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert list(stop_ids(metadata)) == expected


_LLAMA_ENDS = {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
FAMILY_ENDS = [
    ("qwen3moe", "<|im_end|>", {"<|im_end|>", "<|endoftext|>"}),
    ("qwen35", "<|endoftext|>", {"<|im_end|>", "<|endoftext|>"}),
    ("qwen35moe", "<|im_end|>", {"<|im_end|>", "<|endoftext|>"}),
    ("gpt-oss", "<|return|>", {"<|return|>", "<|endoftext|>", "<|call|>"}),
    ("gpt-oss", "<|end|>", {"<|return|>", "<|endoftext|>", "<|call|>"}),
    ("gemma4", "<eos>", {"<eos>", "<turn|>", "<|tool_response>"}),
    ("gemma4", "</s>", {"<eos>", "<turn|>", "<|tool_response>"}),
    ("llama", "<|eot_id|>", {*_LLAMA_ENDS, "<|im_end|>", "<|endoftext|>"}),
    ("llama", "</s>", {*_LLAMA_ENDS, "<|im_end|>", "<|endoftext|>", "</s>"}),
]


@pytest.mark.parametrize(("architecture", "named", "expected"), FAMILY_ENDS)
def test_every_family_has_its_end_tokens(tmp_path, architecture, named, expected):
    texts = ["a", "</s>", "<|end|>", "<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>"]
    texts += ["<eos>", "<turn|>", "<|tool_response>", "<end_of_turn>"]
    texts += ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_token_list(texts)
    writer.add_eos_token_id(texts.index(named))
    finish(writer)
    found = stop_ids(open_gguf(tmp_path / "x.gguf").metadata)
    assert {texts[i] for i in found} == expected
    assert len(found) == len(expected)


def gemma() -> tokenizers.Tokenizer:
    """A BPE over characters as Gemma ships it: spaces spelt, bytes for what is unknown."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=220, show_progress=False)
    core.train_from_iterator([*(t for t in TEXTS if "ünï" not in t), "a  b\n\n\nc   d"], trainer)
    fields = json.loads(core.to_str())
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{i:02X}>" for i in range(256))]
    merges = [pair for pair in fields["model"]["merges"]]
    ordered = [*texts, "\n\n", "\n\n\n", *sorted(fields["model"]["vocab"])]
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(ordered))}
    fields["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    fields["model"] |= {"vocab": vocabulary, "merges": merges}
    fields["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    core = tokenizers.Tokenizer.from_str(json.dumps(fields))
    core.add_special_tokens(["<bos>", "<eos>", "<turn|>"])
    core.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("\n\n", "\n\n\n")])
    return core


def test_gemmas_tokenizer_is_rebuilt(tmp_path):
    core = gemma()
    tokens = [core.id_to_token(i) for i in range(core.get_vocab_size())]
    special = {"<bos>": 3, "<eos>": 3, "<turn|>": 3, "<pad>": 3, "<unk>": 2}
    kinds = [special.get(t, 6 if t.startswith("<0x") else 1) for t in tokens]
    merges = [" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)  # as in some files; the family has one regardless
    for name in ("bos", "eos", "unk"):
        getattr(writer, f"add_{name}_token_id")(tokens.index(f"<{name}>"))
    finish(writer)
    metadata = open_gguf(tmp_path / "x.gguf").metadata
    rebuilt = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    start = tokens.index("<bos>")
    for text in [*TEXTS, "a\n\nb\n", "x\n\n\ny", "<bos>hi<turn|>"]:
        ids = core.encode(text).ids
        assert rebuilt.encode(text).ids == [start, *ids]
        assert rebuilt.encode(text, add_special_tokens=False).ids == ids
        assert rebuilt.decode(ids) == core.decode(ids)
        if "<" not in text:
            assert rebuilt.decode(ids) == text
    assert tokens.index("\n\n\n") in rebuilt.encode("x\n\n\ny").ids


def test_control_tokens_are_found_in_a_file_without_kinds(tmp_path):
    """Otherwise their text would be split; tags without such marks stay text."""
    core = trained()
    metadata = dict(write(tmp_path / "x.gguf", core, "qwen2"))
    del metadata["tokenizer.ggml.token_type"]
    rebuilt = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    text = "<|im_start|>user\nhi<|im_end|><|endoftext|>"
    assert rebuilt.encode(text).ids == core.encode(text).ids
    assert rebuilt.decode(rebuilt.encode(text).ids) == "user\nhi"


def best_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: of all neighbours that make a piece, the best, leftmost first."""
    parts = list(text)
    while True:
        made = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in scores
        ]
        if not made:
            return [
                p if p in scores else byte
                for p in parts
                for byte in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])
            ]
        at = min(made)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def write_sentencepiece(path, tokens, kinds, scores, *, architecture="llama", **changes):
    """Metadata of a SentencePiece vocabulary as llama.cpp's converter stores it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    for key, value in changes.items():
        getattr(writer, key)(value)
    finish(writer)
    return dict(open_gguf(path).metadata)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepieces_tokenizer_is_rebuilt(tmp_path, prefix):
    rng = random.Random(0)
    spaced = ["\u2581" + t.replace(" ", "\u2581") for t in TEXTS]
    made = {t[i : i + n] for t in spaced for n in (2, 3, 4) for i in range(len(t) - n)}
    letters = sorted({c for t in spaced for c in t if c.isascii() or c == "\u2581"})
    words = sorted(word for word in made if set(word) <= set(letters))
    rng.shuffle(words)
    scores = {w: -float(i) for i, w in enumerate(words)}
    scores |= {c: -1e4 - i for i, c in enumerate(letters)}
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *scores]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(scores)]
    numbers = [0.0] * 259 + list(scores.values())
    changes = {} if prefix else {"add_add_space_prefix": False}
    metadata = write_sentencepiece(tmp_path / "x.gguf", tokens, kinds, numbers, **changes)
    files = tokenizer_files(metadata)
    rebuilt = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in [*TEXTS, "".join(rng.choices(" abcdef\n漢", k=200))]:
        spelt = ("\u2581" * prefix + text).replace(" ", "\u2581") if text else ""
        found = rebuilt.encode(text)
        assert found.tokens == ["<s>", *best_first(spelt, scores)]
        assert rebuilt.decode(found.ids) == text
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="no number for each of"):
        tokenizer_files(metadata)


# A vocabulary with runs of white space as Gemma has them, and what llama.cpp makes of texts.
RUNS = {"\n": 4, "\n\n": 4, "  ": 4, "   ": 4, "\t\t": 4, "\u2581\u2581\u2581\u2581": 4, "<tag>": 4}
LETTERS = ("\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", ">", "g>")
LLAMA_TOKENS = {
    "a  b": "a|  |b",
    " a": "\u2581a",
    "   ab   a     b": "   |ab|   |a|   |  |b",
    "a \n\n\n b": "a|\u2581|\n\n|\n|\u2581|b",
    "\t\t\ta": "\t\t|<0x09>|a",
    "a\u2581\u2581b": "a|\u2581|\u2581|b",
    "a\u2581\u2581\u2581\u2581b": "a|\u2581\u2581\u2581\u2581|b",
    "<tag>  <unk> <tag": "<tag>|  |<unk>|\u2581|<0x3C>|<0x74>|a|<0x67>",
}


def test_runs_of_spaces_are_the_tokens_of_the_file(tmp_path):
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *RUNS, *LETTERS]
    kinds = [2, 3, 3, *[6] * 256, *RUNS.values(), *[1] * len(LETTERS)]
    scores = [-float(i) for i in range(len(tokens))]
    off = {"add_add_space_prefix": False}
    metadata = write_sentencepiece(tmp_path / "x.gguf", tokens, kinds, scores, **off)
    files = tokenizer_files(metadata)
    tokenizer = Tokenizer.from_files(files, where="here")
    assert tokenizer.size == len(tokens)
    for text, expected in LLAMA_TOKENS.items():
        ids = tokenizer.encode(text, specials=False)
        assert "|".join(tokens[i] for i in ids) == expected
        shown = text.replace("\u2581", " ").replace("<unk>", "")
        assert tokenizer.decode(ids) == shown
    again = tokenizers.Tokenizer.from_str(
        tokenizer_files(metadata_of(files, len(tokens), tmp_path))["tokenizer.json"]
    )
    for text in LLAMA_TOKENS:
        assert again.encode(text).ids == tokenizer.encode(text)


def metadata_of(files, size, folder):
    """The metadata of a folder's tokenizer, written and read again."""
    with (folder / "y.gguf").open("wb") as file:
        write_gguf(file, tokenizer_metadata(files, size), [], lambda _: None)
    return open_gguf(folder / "y.gguf").metadata


@pytest.mark.parametrize("named", [{"architecture": "phi3"}, {"add_name": "Phi-3 mini"}, {}])
def test_phi3s_turns_take_the_white_space_after_them(tmp_path, named):
    """Files do not say so; llama.cpp goes by the model's name."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "<|user|>", "<|end|>", "\u2581", "a", "\u2581a"]
    kinds = [2, 3, 3, *[6] * 256, 3, 4, 1, 1, 1]
    scores = [-float(i) for i in range(len(tokens))]
    metadata = write_sentencepiece(tmp_path / "x.gguf", tokens, kinds, scores, **named)
    rebuilt = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
    ids = rebuilt.encode("<s> a<|user|>\n a<|end|>\n\n<|user|>").ids
    found = [tokens[i] for i in ids[1:]]
    kept = ["<s>", "\u2581", "\u2581a", "<|user|>", "\u2581a", "<|end|>", "<|user|>"]
    whole = [
        *kept[:4],
        "\u2581",
        "<0x0A>",
        "\u2581a",
        "<|end|>",
        "\u2581",
        "<0x0A>",
        "<0x0A>",
        kept[-1],
    ]
    assert found == (kept if named else whole)


def test_chat_templates_are_carried_by_name(tmp_path):
    core = trained()
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    one = write(tmp_path / "1.gguf", core, "qwen2", add_chat_template="A")
    both = write(tmp_path / "2.gguf", core, "qwen2", add_chat_template=templates)
    first, second = (json.loads(tokenizer_files(m)["tokenizer_config.json"]) for m in (one, both))
    assert first["chat_template"] == "A"
    assert sorted(second["chat_template"], key=lambda t: t["name"]) == templates


def byte_tokenizer(folder):
    """Write a tokenizer of 256 bytes into a folder, and return its text."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    text = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).to_str()
    folder.mkdir()
    (folder / "tokenizer.json").write_text(text)
    return text


def test_a_model_whose_tokenizer_cannot_be_rebuilt_takes_ids_or_another_folders(tmp_path):
    def unknown(writer):
        writer.add_tokenizer_model("bert")
        writer.add_token_list(sorted(ByteLevel.alphabet()))

    path = write_family(ORACLE / "targets/qwen3", tmp_path / "x.gguf", extra=unknown)
    with pytest.warns(UserWarning, match="cannot be rebuilt.*only token ids can be given"):
        model = dj.load_target(path)
    assert model.tokenizer is None
    assert model.forward([[1, 2, 3]]).logits.shape[1] == 3
    byte_tokenizer(tmp_path / "fitting")
    tokenizer = dj.load_target(path, tokenizer=tmp_path / "fitting").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("hello") == [sorted(ByteLevel.alphabet()).index(c) for c in "hello"]
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        dj.load_target(path, tokenizer=ORACLE / "targets/qwen3")
    with pytest.raises(CheckpointError, match="there is no tokenizer at"):
        dj.load_target(path, tokenizer=tmp_path / "nowhere")


def test_a_model_is_converted_without_a_tokenizer_that_cannot_be_rebuilt(tmp_path, capsys):
    def unknown(writer):
        writer.add_tokenizer_model("bert")

    path = write_family(ORACLE / "targets/qwen3", tmp_path / "x.gguf", extra=unknown)
    assert main(["convert", str(path), str(tmp_path / "bare")]) == 0
    printed = capsys.readouterr().out
    assert (
        "no tokenizer is written, so only token ids can be given: the tokenizer 'bert'" in printed
    )
    assert "--tokenizer" in printed
    notes = json.loads((tmp_path / "bare/conversion.json").read_text())["notes"]
    assert [note for note in notes if "no tokenizer is written" in note]
    assert not list((tmp_path / "bare").glob("tokenizer*"))
    model = dj.load_target(tmp_path / "bare")
    assert model.tokenizer is None
    text = byte_tokenizer(tmp_path / "fitting")
    expected = dj.load_target(path, tokenizer=tmp_path / "fitting").forward([[1, 2, 3]]).logits
    assert (model.forward([[1, 2, 3]]).logits == expected).all()
    given = ["--tokenizer", str(tmp_path / "fitting")]
    assert main(["convert", str(path), str(tmp_path / "out"), *given]) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == text
    assert main(["convert", str(path), str(tmp_path / "b"), "--tokenizer", str(tmp_path)]) == 1
    assert "holds no tokenizer.json" in capsys.readouterr().err


def test_the_tokenizer_of_another_model_is_refused_before_anything_is_written(tmp_path, capsys):
    """By an id that the model does not have, by other texts, or by too few."""
    core = trained()
    size = core.get_vocab_size(with_added_tokens=True) + 3

    def swapped(tokens):
        tokens["vocab"] = dict(
            zip(tokens["vocab"], reversed(tokens["vocab"].values()), strict=True)
        )

    def few(tokens):
        tokens["merges"] = []
        tokens["vocab"] = {"a": 0, "b": 1}

    def far(tokens):
        tokens["vocab"]["far"] = size

    def far_end(tokens):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        first = len(tokens["vocab"])
        fields["added_tokens"] = [
            {"id": i, "content": f"<{i}>", "special": True} | plain for i in range(first, size + 1)
        ]
        settings = {"eos_token": f"<{size}>"}
        (tmp_path / "given/tokenizer_config.json").write_text(json.dumps(settings))

    write(tmp_path / "v.gguf", core, "qwen2", architecture="qwen2")
    metadata = {k: v for k, v in open_gguf(tmp_path / "v.gguf").metadata.items() if "ggml" in k}
    config = tiny_target(model_type="llama", vocab_size=size, num_layers=1, qk_norm=False)
    tree = TreeSource(random_params(build_pair(config))["target"], config)
    for tokenizer, name in ((metadata, "own"), ({}, "none")):
        weights = Weights(config, tree, tokenizer=tokenizer)
        export(weights, tmp_path / f"{name}.gguf", layout="gguf", dtype="f32")
    cases = [
        ("own", swapped, "of another model: of"),
        ("none", few, "has 2 tokens"),
        ("own", far, f"'far' has the id {size}"),
        ("none", far, f"'far' has the id {size}"),
        ("own", far_end, f"the eos_token of {tmp_path / 'given'}, '<{size}>', has the id {size}"),
    ]
    (tmp_path / "given").mkdir()
    for name, change, message in cases:
        fields = json.loads(core.to_str())
        fields["added_tokens"] = []
        change(fields["model"])
        (tmp_path / "given/tokenizer.json").write_text(json.dumps(fields))
        for out in ("out", "out.gguf"):
            pair = [str(tmp_path / f"{name}.gguf"), str(tmp_path / out)]
            assert main(["convert", *pair, "--tokenizer", str(tmp_path / "given")]) == 1
            assert message in capsys.readouterr().err
            assert not (tmp_path / out).exists()
        for load in (dj.load, dj.load_target):
            with pytest.raises(ConfigError, match=re.escape(message)):
                load(tmp_path / f"{name}.gguf", tokenizer=tmp_path / "given")
    (tmp_path / "given/tokenizer_config.json").unlink()
    (tmp_path / "given/tokenizer.json").write_text(core.to_str())
    for name in ("own", "none"):
        pair = [str(tmp_path / f"{name}.gguf"), str(tmp_path / name)]
        assert main(["convert", *pair, "--tokenizer", str(tmp_path / "given")]) == 0
    write(tmp_path / "short.gguf", core, "qwen2", tokens=["a", "b", "<|im_end|>", "<|endoftext|>"],
          kinds=[1, 1, 3, 3], merges=[])  # fmt: skip
    pair = [str(tmp_path / "own.gguf"), str(tmp_path / "out.gguf")]
    assert main(["convert", *pair, "--tokenizer", str(tmp_path / "short.gguf")]) == 1
    assert f"has 4 tokens, and the model {size}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert' with the word pattern 'qwen2' cannot be rebuilt"),
        ({"merges": []}, "lists no merges.*Give the folder of the original tokenizer"),
        ({"merges": [1, 2]}, "merges is no array of at most .* strings"),
        ({"merges": ["zz qq"]}, "merge 'zz qq' is not two tokens"),
        ({"merges": ["~ ~"]}, "merge '~ ~' is not two tokens of the vocabulary that make a third"),
        ({"kinds": [1]}, "shorter than the"),
        ({"tokens": ["a", "a", "<|im_end|>", "<|endoftext|>"], "kinds": [1, 1, 3, 3],
          "merges": ["a a"]}, "are equal"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(tmp_path, changes, message):
    core = trained()
    metadata = write(tmp_path / "x.gguf", core, "qwen2", **changes)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(metadata)


def test_a_file_without_a_tokenizer_gives_none():
    assert tokenizer_files({"general.architecture": "dflash"}) == {}


def test_marks_of_turns_that_are_typed_as_text_are_control_tokens(tmp_path):
    core = trained()
    names = [core.id_to_token(i) for i in range(core.get_vocab_size(with_added_tokens=True))]
    right = [3 if t in SPECIALS else 4 if t == "<think>" else 1 for t in names] + [5] * 3
    for wrong in (["<|im_end|>"], ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]):
        kinds = [1 if i < len(names) and names[i] in wrong else k for i, k in enumerate(right)]
        template = "<|im_start|>{{ messages }}<|im_end|>"
        changes = {"kinds": kinds, "add_chat_template": template}
        metadata = write(tmp_path / "x.gguf", core, "qwen2", **changes)
        with pytest.warns(UserWarning, match=r"'<\|im_end\|>'.* are normal text"):
            files = tokenizer_files(metadata)
        rebuilt = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        for text in TEXTS:
            assert rebuilt.encode(text).ids == core.encode(text).ids
    plain = [1 if t == "<think>" else k for t, k in zip([*names, "", "", ""], right, strict=True)]
    tokenizer_files(write(tmp_path / "x.gguf", core, "qwen2", kinds=plain))  # no warning


def test_end_tokens_that_users_added_are_no_text(tmp_path):
    core = trained()
    names = [core.id_to_token(i) for i in range(core.get_vocab_size(with_added_tokens=True))]
    kinds = [4 if t in SPECIALS or t == "<think>" else 1 for t in names] + [5] * 3
    files = tokenizer_files(write(tmp_path / "x.gguf", core, "qwen2", kinds=kinds))
    tokenizer = Tokenizer.from_files(files, where="here")
    end = names.index("<|im_end|>")
    ids = [*core.encode("Hello").ids, end]
    assert tokenizer.decode(ids) == "Hello<|im_end|>"
    output = Detokenizer(tokenizer, end_ids=[end])
    assert output.push(ids) + output.finish() == "Hello"


def test_a_rebuilt_tokenizer_is_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    kept = tmp_path / "home" / "dflash_jax" / rebuilding.KEPT
    core = trained()
    metadata = write(tmp_path / "x.gguf", core, "qwen2")
    files = tokenizer_files(metadata)
    [path] = kept.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(rebuilding, "_rebuilt", None)
        assert tokenizer_files(open_gguf(tmp_path / "x.gguf").metadata) == files
    path.write_bytes(path.read_bytes()[:-1])
    assert tokenizer_files(metadata) == files
    other = write(tmp_path / "y.gguf", core, "llama-bpe")  # the same tokens
    assert tokenizer_files(other) != files
    assert len([*kept.iterdir()]) == 2
    monkeypatch.setenv("DFLASH_COMPILATION_CACHE", "off")
    path.unlink()
    assert tokenizer_files(metadata) == files
    assert len([*kept.iterdir()]) == 1
