"""Tokenizers written as GGUF metadata and rebuilt from it encode and decode as the originals."""

import dataclasses
import json
import shutil
from pathlib import Path

import gguf
import pytest
import tokenizers
from weight_files import ORACLE

from dflash_jax.converters.convert import convert
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.formats.gguf.writer import write_gguf
from dflash_jax.converters.gguf.export import as_gguf
from dflash_jax.converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from dflash_jax.converters.gguf.tokenizer import tokenizer_files
from dflash_jax.converters.gguf.tokenizer_export import tokenizer_metadata
from dflash_jax.converters.models import open_model
from dflash_jax.converters.target_tokenizer import for_drafter, of_model, of_path
from dflash_jax.errors import CheckpointError, ConfigError, TokenizerError
from dflash_jax.testing import tiny_target

TINY = Path(__file__).resolve().parents[2] / "dflash_jax" / "data" / "tiny"
TEXTS = [
    "Hello, world! it's 12345 o'clock\n\n  indented\tTABS",
    "def f(x):\r\n    return x**2  # ünïcödé 漢字 🎉",
    "<|im_start|>user\n<think>hi</think><|im_end|>",
    "",
]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "\u2581"


def byte_level(*steps) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on the texts above; without steps, split as by Qwen2."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(QWEN2), "isolated")
    usual = (split, pre.ByteLevel(add_prefix_space=False, use_regex=False))
    core.pre_tokenizer = pre.Sequence([*(steps or usual)])
    core.normalizer = None if steps else tokenizers.normalizers.NFC()
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    core.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return core


def of_characters(*, before: bool) -> tokenizers.Tokenizer:
    """A BPE over characters with byte tokens, as SentencePiece and Gemma have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    letters = [SPACE, *"helowrd,!", "he", "ll", "hell", "hello", f"{SPACE}w", "or", f"{SPACE}wor"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (SPACE, "w"), ("o", "r")]
    merges += [(f"{SPACE}w", "or")]
    model = tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate([*pieces, *letters])},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    core, norm = tokenizers.Tokenizer(model), tokenizers.normalizers
    steps = [norm.Prepend(SPACE)] if before else []
    core.normalizer = norm.Sequence([*steps, norm.Replace(" ", SPACE)])
    replace = tokenizers.decoders.Replace(SPACE, " ")
    last = [tokenizers.decoders.Strip(" ", 1, 0)] if before else []
    core.decoder = tokenizers.decoders.Sequence(
        [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), *last]
    )
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return core


def through_gguf(path, core: tokenizers.Tokenizer, settings: dict, **options):
    """Return metadata as read from a file with this tokenizer, and the rebuilt files."""
    files = {"tokenizer.json": core.to_str(), "tokenizer_config.json": json.dumps(settings)}
    size = options.pop("size", core.get_vocab_size() + 3)
    with path.open("wb") as file:
        write_gguf(file, tokenizer_metadata(files, size, **options), [], lambda _: None)
    metadata = open_gguf(path).metadata
    return metadata, tokenizer_files(metadata)


def assert_alike(core: tokenizers.Tokenizer, files: dict[str, str], texts=TEXTS) -> None:
    rebuilt = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in texts:
        ids = core.encode(text).ids
        assert rebuilt.encode(text).ids == ids, text
        assert rebuilt.decode(ids) == core.decode(ids)
        whole = rebuilt.decode(ids, skip_special_tokens=False)
        assert whole == core.decode(ids, skip_special_tokens=False)


def test_a_byte_level_tokenizer_survives(tmp_path):
    core = byte_level()
    template = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool", "template": "{{ 2 }}"}]
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    metadata, files = through_gguf(tmp_path / "x.gguf", core, settings)
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    assert metadata["tokenizer.ggml.eos_token_id"] == core.token_to_id("<|im_end|>")
    assert metadata["tokenizer.chat_template"] == "{{ 1 }}"
    assert metadata["tokenizer.chat_templates"].tolist() == ["tool"]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    assert kinds[core.token_to_id("<|im_end|>")] == gguf.TokenType.CONTROL
    assert kinds[core.token_to_id("<think>")] == gguf.TokenType.USER_DEFINED
    assert kinds[-3:] == [gguf.TokenType.UNUSED] * 3
    assert_alike(core, files)
    found = json.loads(files["tokenizer_config.json"])
    assert {entry["name"]: entry["template"] for entry in found["chat_template"]} == {
        "default": "{{ 1 }}",
        "tool": "{{ 2 }}",
    }


def test_steps_without_a_pattern_are_known_by_the_pattern_they_stand_for():
    pre = tokenizers.pre_tokenizers
    words = pre.ByteLevel(add_prefix_space=False)
    for steps, name in (((words,), "gpt-2"), ((pre.Digits(True), words), "smollm")):
        files = {"tokenizer.json": byte_level(*steps).to_str()}
        assert tokenizer_metadata(files, 400)["tokenizer.ggml.pre"].value == name


def test_added_tokens_without_a_row_are_left_out(tmp_path):
    """Gemma 3's text models have the tokenizer of the others, with a mark of images at the end."""
    core = of_characters(before=False)
    size = core.get_vocab_size()
    core.add_special_tokens(["<image>"])
    metadata, files = through_gguf(tmp_path / "x.gguf", core, {}, size=size)
    assert core.token_to_id("<image>") == size
    assert "<image>" not in metadata["tokenizer.ggml.tokens"].tolist()
    assert_alike(core, files)


def test_a_pattern_with_line_ends_as_characters_has_the_same_name():
    """DeepSeek-V3's file spells them so, within JSON's own escapes."""
    split = tokenizers.pre_tokenizers.Split
    patterns = [
        p.replace(r"\r", "\r").replace(r"\n", "\n") for p in PRE_TOKENIZERS["deepseek-v3"].patterns
    ]
    assert "\n" in patterns[-1]
    steps = [split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    files = {"tokenizer.json": byte_level(tokenizers.pre_tokenizers.Sequence(steps)).to_str()}
    assert tokenizer_metadata(files, 400)["tokenizer.ggml.pre"].value == "deepseek-v3"


@pytest.mark.parametrize(("gemma4", "before"), [(False, False), (False, True), (True, False)])
def test_a_tokenizer_of_characters_survives(tmp_path, before, gemma4):
    core = of_characters(before=before)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    metadata, files = through_gguf(tmp_path / "x.gguf", core, settings, gemma4=gemma4)
    assert metadata["tokenizer.ggml.model"] == ("gemma4" if gemma4 else "llama")
    assert metadata["tokenizer.ggml.add_space_prefix"] is before
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.bos_token_id"] == 1
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    assert kinds[:4] == [2, 3, 3, 6]
    assert_alike(core, files, ["hello world", "wor hello, hell!", "漢 x\n", ""])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Unigram"}, "of the type 'Unigram' is not written to GGUF; BPE is"),
        ({"vocab": {"a": 500}}, "'a' has the id 500; the model has 400 tokens"),
        ({"merges": [["a b", "c d"]]}, "has no form in GGUF, where a space divides two"),
        ({"merges": ["abc"]}, "'abc' is no pair of tokens"),
    ],
)
def test_tokenizers_without_a_form_are_refused(change, message):
    fields = json.loads(byte_level().to_str())
    fields["model"] |= change
    with pytest.raises(TokenizerError, match=message):
        tokenizer_metadata({"tokenizer.json": json.dumps(fields)}, 400)


def test_runs_of_spaces_are_merged_as_before(tmp_path):
    """Gemma lists them among its added tokens, too, spelt as the text has them after merging."""
    core = of_characters(before=False)
    fields = json.loads(core.to_str())
    run = {"content": SPACE * 2, "special": False, "normalized": False}
    run |= {"single_word": False, "lstrip": False, "rstrip": False}
    fields["model"]["vocab"][SPACE * 2] = run["id"] = core.get_vocab_size()
    fields["model"]["merges"].insert(0, [SPACE, SPACE])
    fields["added_tokens"].append(run)
    core = tokenizers.Tokenizer.from_str(json.dumps(fields))
    texts = ["hello  world", "   hello", f"he{SPACE}{SPACE}{SPACE}ll", *TEXTS]
    assert core.encode("  h").tokens == ["<s>", SPACE * 2, "h"]
    for gemma4 in (False, True):
        metadata, files = through_gguf(tmp_path / "x.gguf", core, {}, gemma4=gemma4)
        tokens, kinds = (metadata[f"tokenizer.ggml.{k}"].tolist() for k in ("tokens", "token_type"))
        assert (tokens[run["id"]], kinds[run["id"]]) == (SPACE * 2, gguf.TokenType.NORMAL)
        assert_alike(core, files, texts)


def test_an_unknown_pattern_and_a_damaged_file_are_named():
    unknown = byte_level(tokenizers.pre_tokenizers.Split(tokenizers.Regex("x+"), "isolated"))
    with pytest.raises(TokenizerError, match="word pattern has no name in GGUF; known are gpt-2"):
        tokenizer_metadata({"tokenizer.json": unknown.to_str()}, 400)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        tokenizer_metadata({"tokenizer.json": "{"}, 400)


def test_end_tokens_that_no_text_shows_are_named():
    target = open_model(TINY / "target")

    def ends(metadata, *ids):
        config = dataclasses.replace(target.config, eos_token_ids=ids)
        found = as_gguf(config, target.tensors, "f32", metadata).metadata
        keys = {name: f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")}
        return {name: found[key].value for name, key in keys.items() if key in found}

    assert ends({}, 5, 7, 9, 11) == {"eos": 5, "eot": 7, "eom": 9}
    assert ends(of_model(target), *target.config.eos_token_ids) == {"eos": 2040}
    assert ends(of_model(target), 2040, 17) == {"eos": 2040, "eot": 17}


def test_a_drafter_takes_the_tokenizer_of_its_target_only(tmp_path):
    target, drafter = (open_model(TINY / role) for role in ("target", "drafter"))
    found = for_drafter(drafter.config, target)
    assert len(found["tokenizer.ggml.tokens"].value) == drafter.config.vocab_size
    with pytest.raises(ConfigError, match="the drafter has 97 tokens and"):
        for_drafter(tiny_target(), target)
    with pytest.raises(ConfigError, match="is a drafter; its target has the tokenizer"):
        of_model(drafter)
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        of_path(tmp_path, target.config)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_pattern_is_named_and_splits_as_before(tmp_path, name):
    """Patterns with several names keep their meaning, not their name."""
    how, pre = PRE_TOKENIZERS[name], tokenizers.pre_tokenizers
    fields = json.loads(byte_level(pre.ByteLevel(add_prefix_space=False)).to_str())
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    last["trim_offsets"] = True
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*how.splits(), last]}
    fields["normalizer"], fields["model"]["ignore_merges"] = how.normalizer(), how.whole_words
    metadata = tokenizer_metadata({"tokenizer.json": json.dumps(fields)}, 400)
    found = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"].value]
    assert (found.patterns, found.composed) == (how.patterns, how.composed)
    assert found.whole_words == how.whole_words


def test_a_target_whose_tokenizer_has_no_form_is_written_without(tmp_path):
    folder = tmp_path / "f"
    shutil.copytree(ORACLE / "targets" / "qwen3", folder)
    core = byte_level(tokenizers.pre_tokenizers.Split(tokenizers.Regex("x+"), "isolated"))
    (folder / "tokenizer.json").write_text(core.to_str())
    report = convert(open_model(folder), tmp_path / "x.gguf", to="gguf")
    (note,) = report["notes"]
    assert note.startswith("no tokenizer was written, without which llama.cpp does not load")
    assert "the model has 256 tokens" in note
    open_model(tmp_path / "x.gguf").check()
    with pytest.raises(TokenizerError):
        convert(open_model(folder), tmp_path / "y.gguf", to="gguf", tokenizer=folder)
    assert not (tmp_path / "y.gguf").exists()
