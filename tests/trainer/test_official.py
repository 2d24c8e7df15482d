"""A trained drafter in the official package: the exported folder gives our logits there.

Needs `pip install torch==2.13.0 transformers==5.15.0 dflash==0.1.0`; skipped elsewhere.
"""

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import folder_params, random_params, tiny_target
from dflash_jax.trainer import drafter, features, run, training
from dflash_jax.trainer.recipes import SMOKE, Bucket, Schedule
from dflash_jax.trainer.rows import TokenRows

torch = pytest.importorskip("torch", reason="torch is not installed")
package = pytest.importorskip("dflash.model", reason="the dflash package is not installed")

pytestmark = pytest.mark.torch
LENGTH, MASK = 32, 96
SHIPPED = Path(str(importlib.resources.files("dflash_jax"))) / "data" / "tiny"


def trained(folder: Path, kind: str) -> Path:
    """Export a random target and a drafter trained for two steps, as a run does."""
    target = tiny_target(num_layers=3, vocab_size=128)
    model = TargetModel(target, random_params(build_pair(target, None))["target"], "float32")
    own = {"bos_token_id": None, "pad_token_id": 0}
    run.write_huggingface(folder / "target", target, model.params, **own)
    recipe = dataclasses.replace(
        SMOKE,
        kind=kind,
        layers=2,
        rank=16,
        buckets=(Bucket(length=LENGTH, rows=2),),
        schedule=Schedule(steps=2, rate=1e-2),
    )
    tokens = np.random.default_rng(0).integers(0, MASK, (4, LENGTH)).astype(np.int32)
    rows = [TokenRows(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))]
    fitted = training.fit(
        model, recipe, MASK, rows, folder / "run", identity="x", report=lambda line: None
    )
    run.write_drafter(folder / "drafter", fitted.config, fitted.params)
    return folder


def ours(folder: Path, ids: np.ndarray, anchor: int) -> np.ndarray:
    """Return logits [b-1, V] of one block from the training path."""
    configs = read_target_config(folder / "target"), read_drafter_config(folder / "drafter")
    params: dict[str, Any] = {
        "target": folder_params(folder / "target", configs[0], "float32"),
        "drafter": folder_params(folder / "drafter", configs[1], "float32"),
    }
    pair = build_pair(*configs)

    @jax.jit
    def logits(params: Any, ids: Any) -> Any:
        read = features.target_features(pair, params["target"], ids, dtype="float32", keep=False)
        hidden = drafter.draft_hidden(pair, params, read, ids, np.asarray([[anchor]], np.int32))
        return pair.drafter_call(params, pair.shared(params).head(hidden), method="adjust")

    return np.asarray(logits(params, ids)[0, 0])


def theirs(folder: Path, ids: np.ndarray, anchor: int) -> tuple[np.ndarray, Any]:
    """Return the same from PyTorch: prefill up to the anchor, then one block."""
    from transformers import AutoModelForCausalLM

    name = read_drafter_config(folder / "drafter").kind
    kind = package.DFlash2DraftModel if name == "dflash2" else package.DFlashDraftModel
    one, two = (
        load.from_pretrained(folder / part, dtype=torch.float32).eval()
        for load, part in ((AutoModelForCausalLM, "target"), (kind, "drafter"))
    )
    tokens = torch.from_numpy(ids.astype(np.int64))
    block = torch.full((1, two.block_size), two.mask_token_id)
    block[0, 0] = tokens[0, anchor]
    with torch.inference_mode():
        states = one(tokens[:, :anchor], output_hidden_states=True).hidden_states
        hidden = two(
            position_ids=torch.arange(anchor + two.block_size)[None],
            noise_embedding=one.get_input_embeddings()(block),
            target_hidden=package.extract_context_feature(states, two.target_layer_ids),
        )[:, 1:]
        return two.compute_logits(hidden, one.lm_head)[0].numpy(), two


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "shipped"])
def test_the_export_gives_our_logits_in_the_official_package(kind, tmp_path):
    folder = SHIPPED if kind == "shipped" else trained(tmp_path, kind)
    ids = np.random.default_rng(1).integers(0, MASK, (1, LENGTH)).astype(np.int32)
    for anchor in (1, 9, LENGTH - 8):
        expected, module = theirs(folder, ids, anchor)
        np.testing.assert_allclose(ours(folder, ids, anchor), expected, atol=1e-4, rtol=1e-4)
        assert np.abs(expected).max() > 0.1
    tensors = {name for name, _ in module.named_parameters()}
    per_layer, rest = (15, 6) if kind == "dflash2" else (11, 3)
    assert len(tensors) == per_layer * len(module.layers) + rest
