"""Next-token probabilities of two models, compared on texts."""

import dataclasses
import json
import os
import types

import numpy as np
import pytest

from dflash_jax.bench import logits
from dflash_jax.cli import main
from dflash_jax.errors import RequestError


def made(vocabulary, factor):
    """A model whose logits are drawn from its ids, and its tokenizer of letters."""
    table = np.random.default_rng(0).normal(size=(vocabulary, vocabulary)).astype(np.float32)

    def forward(ids):
        return types.SimpleNamespace(logits=factor * table[np.asarray(ids)])

    tokenizer = types.SimpleNamespace(encode=lambda text: [ord(c) - ord("a") for c in text])
    return types.SimpleNamespace(forward=forward, tokenizer=tokenizer)


def distances(first, second, texts, **options):
    models = {"first": first, "second": second}

    def load(name, dtype):
        assert dtype == "float32"
        return models[name]

    return logits.distances("first", "second", texts, **{"most_tokens": 99} | options, load=load)


def test_figures_are_those_of_the_definitions():
    models = made(8, 1.0), made(8, 1.5)
    text = "abcdefghabacadaeafagahbabcbdbe"
    [found] = distances(*models, [text])
    ids = [ord(c) - ord("a") for c in text]
    p, q = (
        np.exp(z) / np.exp(z).sum(1, keepdims=True)
        for z in (model.forward([ids]).logits[0].astype(float) for model in models)
    )
    assert np.allclose(found.divergence, (p * np.log(p / q)).sum(1))
    assert found.same_top.all()
    following = np.arange(len(ids) - 1), ids[1:]
    assert np.allclose(found.surprise, [-np.log(p[following]), -np.log(q[following])])
    report = logits.summary([found])
    assert report["tokens"] == len(ids)
    assert report["kl_mean"] == report["prompts"][0]["kl_mean"] == found.divergence.mean()
    assert report["same_top"] == 1.0
    assert np.allclose(report["perplexity"], np.exp(found.surprise.mean(axis=1)))


def test_long_texts_are_cut_and_computed_in_parts():
    model = made(8, 1.0)
    text = "abcdefgh" * 20
    [whole] = distances(model, made(8, 2.0), [text], most_tokens=200)
    [part] = distances(model, made(8, 2.0), [text], most_tokens=50)
    assert (len(whole.divergence), len(part.divergence)) == (160, 50)
    assert whole.surprise.shape == (2, 159)
    assert np.array_equal(whole.divergence[:50], part.divergence)
    [same] = distances(model, model, [text])
    assert not same.divergence.any()


def test_padding_of_a_vocabulary_is_left_out():
    small, large = made(8, 1.0), made(8, 1.0)
    forward = large.forward

    def padded(ids):
        wide = np.pad(forward(ids).logits, ((0, 0), (0, 0), (0, 4)), constant_values=9.0)
        return types.SimpleNamespace(logits=wide)

    large.forward = padded
    [found] = distances(small, large, ["abc"])
    assert not found.divergence.any()


@pytest.mark.parametrize(("text", "message"), [("a", "give at least 2"), ("abz", "lacks")])
def test_texts_that_cannot_be_compared_are_named(text, message):
    def forward(ids):
        return types.SimpleNamespace(logits=np.zeros((1, np.shape(ids)[1], 8)))

    model = made(8, 1.0)
    model.forward = forward
    with pytest.raises(RequestError, match=message):
        distances(model, model, [text])


def test_the_command_refuses_wrong_options_before_models_are_opened(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "none.txt").write_text("\n \n")
    (tmp_path / "p.txt").write_text("Hello there\n")
    for options, message in (
        (["--logits", tmp_path / "missing"], "cannot be read"),
        (["--logits", tmp_path / "none.txt"], "holds no prompt"),
        (["--plot", tmp_path / "p.png"], "add --logits PROMPTS"),
        (["--logits", tmp_path / "p.txt", "--max-tokens", "1"], "expected at least 2"),
        (["--logits", tmp_path / "p.txt", "--plot", tmp_path / "x" / "p.png"], "create it first"),
    ):
        assert main(["compare", "no/model", "no/model", *map(str, options)]) == 1
        assert message in capsys.readouterr().err


def test_the_command_adds_probabilities_to_its_report(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "p.txt").write_text("abcd\n\ndcba\n")
    found = distances(made(8, 1.0), made(8, 1.1), ["abcd", "dcba"])
    found[0] = dataclasses.replace(found[0], text=r"costs $\no such symbol$")
    monkeypatch.setattr(logits, "distances", lambda *paths, **options: found)
    command = ["compare", "tiny", "tiny", "--logits", str(tmp_path / "p.txt")]
    assert main([*command, "--plot", str(tmp_path / "p.png"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agree"]
    assert report["logits"]["prompts"][1]["text"] == "dcba"
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert main(command) == 0
    assert "same top token 100.00%" in capsys.readouterr().out


def test_prompts_come_from_a_pipe_and_a_failure_keeps_the_old_picture(
    capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    read, write = os.pipe()
    os.write(write, b"abcd\n")
    os.close(write)
    picture = tmp_path / "p.png"
    picture.write_bytes(b"old")
    asked = []

    def failing(first, second, texts, **options):
        asked.extend(texts)
        raise RequestError("no tokens")

    monkeypatch.setattr(logits, "distances", failing)
    command = ["compare", "tiny", "tiny", "--logits", f"/dev/fd/{read}"]
    assert main([*command, "--plot", str(picture)]) == 1
    os.close(read)
    assert "no tokens" in capsys.readouterr().err
    assert asked == ["abcd"]
    assert picture.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]
