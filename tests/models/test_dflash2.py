"""DFlash 2 against vectors of the official package, and its losslessness."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import Plan
from dflash_jax.config import TargetConfig
from dflash_jax.converters import export
from dflash_jax.converters.models import open_model
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError
from dflash_jax.families.configs import drafter_config
from dflash_jax.families.dflash2 import DFlash2Config
from dflash_jax.families.dflash2_net import DynamicConvolution
from dflash_jax.graph import Graph
from dflash_jax.graph.build import jit
from dflash_jax.graph.keys import Step
from dflash_jax.graph.protocols import SharedLayers
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.state import RowRules, idle_rules
from dflash_jax.graph.steps.drafting import RowDraftSampler
from dflash_jax.networks import build_drafter, build_pair, build_target
from dflash_jax.testing import planned, random_params, tiny_drafter, tiny_target

KINDS = [
    pytest.param("v2", marks=pytest.mark.soak),  # shaped like v2_trained
    "v2_sliding",
    "v2_small_vocab",
    "v2_trained",
]
TOLERANCE = 2e-4


class Case:
    """An oracle folder: configs, parameters and vectors."""

    def __init__(self, folder: Path):
        self.meta = json.loads((folder / "meta.json").read_text())
        drafter = open_model(folder, role="drafter")
        target = open_model(folder / self.meta["target"], role="target")
        assert isinstance(drafter.config, DFlash2Config)
        assert isinstance(target.config, TargetConfig)
        self.drafter, self.target = drafter.config, target.config
        params = {"drafter": drafter.load("float32"), "target": target.load("float32")}
        self.params = jax.device_put(params)
        self.vectors = load_file(folder / "vectors.safetensors")

    def drafter_apply(self, *args: Any, **kwargs: Any) -> Any:
        variables = {"params": self.params["drafter"]}
        return build_drafter(self.drafter).apply(variables, *args, **kwargs)

    def layers(self) -> SharedLayers:
        variables, module = {"params": self.params["target"]}, build_target(self.target)
        return SharedLayers(
            lambda tokens: module.apply(variables, tokens, method="embed"),
            lambda hidden: module.apply(variables, hidden, method="logits"),
        )


class Recorder(RowDraftSampler):
    """Stand-in for the target whose `draft` returns its arguments."""

    def draft(self, tokens: Any, finite: Any, **more: Any) -> Any:
        return {"tokens": tokens, "finite": finite} | more


def recorder(rules: RowRules, block: Any, start: Any) -> Recorder:
    places = block.shape[1] - 1
    return Recorder(rules, block[:, 0], start, places, False, 97, "xla")


@pytest.mark.parametrize("name", KINDS)
def test_two_rounds_of_drafting_are_the_reference(oracle: Path, name: str) -> None:
    """Hidden states, logits and the greedy path, with a longer context in round 2."""
    case = Case(oracle / "drafters" / name)
    v, prompt = case.vectors, case.meta["rounds"]["prompt"]
    plan = Plan(max_length=64, block=8, chunk=prompt, dtype="float32")
    caches = planned(case.target, case.drafter, plan).empty_state().drafter
    rules, layers = idle_rules(plan), case.layers()

    def draft(
        taps: jax.Array, block: jax.Array, caches: Any, begin: jax.Array, start: jax.Array
    ) -> Any:
        parts = jnp.split(taps, len(case.drafter.target_layer_ids), axis=-1)
        nothing = jnp.zeros(taps.shape[:2], jnp.int32)
        caches = case.drafter_apply(caches, nothing, parts, begin, method="observe")
        x = layers.embed(block) * jnp.float32(case.drafter.input_embedding_scale or 1.0)
        hidden, _ = case.drafter_apply(layers.embed(block), caches, start)
        args = (caches, block[:, 0], start, layers, recorder(rules, block, start))
        draft, _ = case.drafter_apply(*args, method="propose")
        return x, hidden, draft, caches

    begin, run = 0, jit(draft)
    scores = _scores(case)
    for turn in ("round1", "round2"):
        taps, block = v[f"{turn}.target_hidden"], v[f"{turn}.block_ids"]
        start = begin + taps.shape[1]
        at = (np.array([begin], np.int32), np.array([start], np.int32))
        junk = (
            (0, 0),
            (0, prompt - taps.shape[1]),
            (0, 0),
        )  # after committed rows
        taps = np.pad(taps, junk, constant_values=7.0)
        x, hidden, draft, caches = run(taps, block, caches, *at)
        np.testing.assert_allclose(x, v[f"{turn}.noise_embedding"], atol=1e-6)
        np.testing.assert_allclose(hidden, v[f"{turn}.hidden"], atol=TOLERANCE)
        np.testing.assert_array_equal(draft["tokens"], v[f"{turn}.greedy_path"])
        assert bool(draft["finite"][0])
        if f"{turn}.candidates_sorted" in v:
            scored = scores(hidden, block[:, 0])
            found = np.sort(np.asarray(scored[1]), axis=-1)
            np.testing.assert_array_equal(found, v[f"{turn}.candidates_sorted"])
            _check_q_along_the_sampled_path(case, turn, scored)
        begin = start


def _scores(case: Case) -> Any:
    """Compiled: logits, candidates, and the scores of every pair of them."""

    def scores(hidden: jax.Array, anchor: jax.Array) -> tuple[jax.Array, ...]:
        head = case.layers().head(hidden)
        logits = case.drafter_apply(head, method=lambda m, x: m.adjust(x))[:, 1:]
        unary, ids = jax.lax.top_k(logits, case.drafter.selector_top_k)
        args = (hidden[:, 1:], unary, ids, anchor)
        return logits, ids, case.drafter_apply(*args, method="pair_scores")[0]

    return jit(scores)


def _check_q_along_the_sampled_path(case: Case, turn: str, scored: Any) -> None:
    """Check q along the reference's path at temperature 0.8."""
    v, (logits, ids, pairs) = case.vectors, scored
    np.testing.assert_allclose(logits, v[f"{turn}.logits"], atol=TOLERANCE)
    at = 0
    for i, token in enumerate(v[f"{turn}.sampled_path"][0]):
        q = np.zeros(case.drafter.vocab_size, np.float32)
        q[np.asarray(ids)[0, i]] = jax.nn.softmax(pairs[i, at] / 0.8)
        np.testing.assert_allclose(q, v[f"{turn}.sampled_q"][0, i], atol=1e-4)
        at = int(np.flatnonzero(np.asarray(ids)[0, i] == token)[0])


@pytest.mark.parametrize("name", ["conv", "conv_short"])
def test_the_dynamic_convolution_is_the_reference(oracle: Path, name: str) -> None:
    """Input and output convolutions; also on a block shorter than the kernel."""
    case = Case(oracle / "drafters" / "v2")
    variables = {"params": case.params["drafter"]["layers_0"]["attention_conv"]}
    conv, v = DynamicConvolution(case.drafter), case.vectors
    kernels = conv.apply(variables, v[f"{name}.input"], method="dynamic")
    for side, (given, expected) in enumerate((("input", "prepared"), ("middle", "finished"))):
        out: Any = conv.apply(variables, v[f"{name}.{given}"], kernels, side)
        np.testing.assert_allclose(out, v[f"{name}.{expected}"], atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "v2_trained",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("v2", "v2_sliding", "v2_small_vocab")
        ),
    ],
)
def test_speculative_generation_is_the_reference(oracle: Path, name: str) -> None:
    """Tokens and rounds, as long as whole blocks fit: the reference shortens its last ones."""
    case = Case(oracle / "drafters" / name)
    memory = 1 << 40
    plan = Plan(max_length=128, block=8, chunk=24)
    plan = resolve(plan, build_pair(case.target, case.drafter), platform="cpu", memory=memory)
    engine = Engine(Graph(build_pair(case.target, case.drafter), plan), case.params)
    del engine.core.runner.compiled.programs[
        engine.graph.key(Step.PLAIN)
    ]  # not needed here, and compiling takes the time
    prompt = case.vectors["prompt_ids"][0].tolist()
    truth = case.vectors["ar.output_ids"][0].tolist()[len(prompt) :]
    result = engine.generate(prompt, max_tokens=len(truth), ignore_eos=True)
    assert result.token_ids == truth
    lengths = case.vectors["spec.acceptance_lengths"].tolist()
    whole = [n for i, n in enumerate(lengths) if 1 + sum(lengths[: i + 1]) + 8 <= len(truth)]
    assert result.stats.acceptance_lengths[: len(whole)] == whole


def test_without_convolution_and_successors_it_is_version_one() -> None:
    target = tiny_target(num_layers=2)
    v2 = tiny_drafter(target, "dflash2", target_layer_ids=(0,))
    v1 = tiny_drafter(target, target_layer_ids=(0,))
    params = random_params(build_pair(target, v2))["drafter"]
    plain = {k: v for k, v in params.items() if k not in ("predecessor", "successor")}
    plain.pop("selector_hidden")
    for i in range(2):
        layer = params[f"layers_{i}"]
        plain[f"layers_{i}"] = {k: v for k, v in layer.items() if not k.endswith("_conv")}
        for conv in ("attention_conv", "mlp_conv"):
            base = np.zeros_like(layer[conv]["base"])
            base[:, 0] = 1
            layer[conv] = {"base": base, "kernel": layer[conv]["kernel"] * 0}
    params["successor"] = params["successor"] * 0
    table = np.random.default_rng(1).standard_normal((97, 32)).astype(np.float32)
    layers = SharedLayers(
        lambda ids: jnp.asarray(table)[ids], lambda h: jnp.einsum("btd,vd->btv", h, table)
    )
    plan = Plan(max_length=32, block=8, chunk=8, dtype="float32")
    start, block = jnp.asarray([0]), jnp.asarray([[5, *[96] * 7]])
    drafts = []
    for config, tree in ((v1, plain), (v2, params)):
        caches = planned(target, config, plan).empty_state().drafter
        model, greedy = build_drafter(config), recorder(idle_rules(plan), block, start)
        args, variables = (
            (caches, block[:, 0], start, layers, greedy),
            {"params": jax.device_put(tree)},
        )
        propose = functools.partial(model.apply, variables, *args, method="propose")
        drafts.append(jit(propose)()[0]["tokens"])
    np.testing.assert_array_equal(*drafts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 7}, "must divide the hidden size 64"),
        ({"selector_top_k": 0}, "selector_top_k is 0"),
        ({"selector_top_k": 300}, "has only 256"),
        ({"markov_rank": 3}, "does not apply to .*: markov_rank 3"),
        ({"projector_type": "medusa"}, "projector_type is 'medusa'"),
    ],
)
def test_a_config_it_cannot_run_is_refused(oracle: Path, changes: dict, message: str) -> None:
    fields = json.loads((oracle / "drafters" / "v2" / "config.json").read_text())
    fields["dflash_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        drafter_config(fields)


def test_it_survives_being_written(oracle: Path, tmp_path: Path) -> None:
    folder = oracle / "drafters" / "v2_sliding"
    model = open_model(folder)
    weights = export.Weights(model.config, model.tensors)
    export.export(weights, tmp_path / "x", layout="huggingface", dtype="float32")
    again = open_model(tmp_path / "x")
    assert again.config == model.config
    old, new = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "x"))
    assert old.keys() == new.keys()
    for name in old:
        np.testing.assert_array_equal(old[name], new[name])
