"""`dj.train` for targets and drafters of a user: trained by the members that decode."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.errors import CheckpointError, ConfigError, PlanError
from dflash_jax.trainer import blocks, drafter, objective, own_modules
from dflash_jax.trainer.curve import HeldOut
from dflash_jax.trainer.features import target_features
from dflash_jax.trainer.optimizer import of_two_axes
from tests.graph.own_modules import VOCAB, WIDTH, Bigram, Heads, Own
from tests.graph.test_contract import HeadsOfNNX, OfNNX

PROMPTS = [np.random.default_rng(i).integers(1, VOCAB, 6).tolist() for i in range(20)]
SETTINGS = ["steps=30", "save_every=30", "buckets=32x4", "answer_buckets=32x8", "rate=1e-2",
            "text_prompts=20", "text_prompt=6", "text_tokens=16", "held_out=2",
            "held_out_tokens=12"]  # fmt: skip
RECIPE = dj.recipe("smoke", SETTINGS)
PLAN = dj.Plan(max_length=64, chunk=16, block=4)


def quiet(line: str) -> None:
    pass


def train(engine: Any, recipe: Any = RECIPE, **options: Any) -> Any:
    return dj.train(engine, PROMPTS, recipe, **{"on_progress": quiet} | options)


def own_engine(made: Any = None, target: Any = None) -> dj.Engine:
    """Return an engine of a user's target and drafter, with fresh parameters."""
    pair = dj.Pair(target or Own(), made or Heads(WIDTH, depth=1, places=3))
    graph = dj.Graph(pair, PLAN)
    return dj.Engine(graph, graph.init_params(jax.random.key(1)))


@pytest.fixture(scope="module")
def engine() -> dj.Engine:
    return own_engine()


def assert_lossless(drafting: dj.Engine) -> float:
    """Compare with plain decoding; return tokens of a drafted round."""
    plain = drafting.generate(PROMPTS[0], max_tokens=24, ignore_eos=True, speculative=False)
    drafted = drafting.generate(PROMPTS[0], max_tokens=24, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    return drafted.stats.acceptance_length


def test_modules_of_nnx_are_trained_in_one_call_and_draft_better_without_changing_a_token() -> None:
    heads = HeadsOfNNX(3, nnx.Rngs(1))
    engine = own_engine(heads, OfNNX(nnx.Rngs(0)))
    before, seen = assert_lossless(engine), []
    trained = train(
        engine, dj.recipe("smoke", [*SETTINGS, "measure_every=15"]), on_step=seen.append
    )
    assert [metrics["step"] for metrics in seen] == [*range(1, 31)]
    curve = {metrics["step"]: metrics["held_out"] for metrics in seen if "held_out" in metrics}
    assert [*curve] == [15, 30]
    assert curve[30] == pytest.approx(trained.results["ids"]["acceptance_length"], abs=1e-3)
    assert trained.results["ids"]["equal"] == trained.results["ids"]["compared"] > 0
    engine.update_params({"drafter": trained.params})
    assert assert_lossless(engine) > max(before, 2)
    nnx.update(heads, trained.params)
    assert (heads.heads[2].kernel[...] == trained.params["heads"][2]["kernel"]).all()


@pytest.mark.sample("1")
@pytest.mark.parametrize(
    ("lengths", "best"), [((1.0, 3.0, 2.0), 1), ((1.0, 2.0, 2.0), 2)], ids=["1", "2"]
)
def test_the_drafter_that_accepted_most_is_the_result(
    lengths: tuple[float, ...],
    best: int,
    engine: dj.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def measured(self: HeldOut, params: Any) -> dict[str, float]:
        seen.append(params)
        return {"held_out": lengths[len(seen) - 1]}

    monkeypatch.setattr(HeldOut, "__call__", measured)
    recipe = dj.recipe("smoke", [*SETTINGS, "steps=10", "measure_every=4"])
    trained = train(engine, recipe, out=tmp_path / "run")  # it measures after 4, 8 and 10 steps
    jax.tree.map(np.testing.assert_array_equal, trained.params, seen[best])
    note = json.loads((tmp_path / "run" / "best.json").read_text())
    assert note == {"step": (4, 8, 10)[best], "held_out": lengths[best]}
    assert not (tmp_path / "run" / "best").exists()


@pytest.mark.exhaustive
def test_a_trained_drafter_makes_an_engine_and_goes_on_from_memory_and_from_a_file(
    engine: dj.Engine, tmp_path: Path
) -> None:
    trained = train(engine, out=tmp_path / "run")
    assert assert_lossless(trained.engine(dataclasses.replace(PLAN, block=0))) > 1
    again = train(engine, out=tmp_path / "run")  # nothing is left to do
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    path = tmp_path / "heads.safetensors"
    trained.save(path)
    with pytest.raises(CheckpointError, match="exists"):
        trained.save(path)
    with pytest.raises(ConfigError, match="Heads, a module of your own; expected no layout"):
        trained.save(path, layout="speculators", overwrite=True)
    still = dj.recipe("smoke", [*SETTINGS, "steps=1", "rate=1e-12", "weight_decay=0"])
    for start in (path, trained):
        found = train(engine, still, start=start)
        jax.tree.map(np.testing.assert_allclose, found.params, trained.params)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"heads.safetensors cannot be read"):
        train(engine, still, start=path)
    other = own_engine(Heads(WIDTH, depth=1, places=4))
    trained.save(path, overwrite=True)
    with pytest.raises(CheckpointError, match=r"parameters of Heads: w is \(3, 48, 24\), expected"):
        train(other, still, start=path)


class OneByOne:
    """Chooses place by place among some tokens, by a table, with a loss of its own."""

    taps = ()
    ids = jnp.arange(0, VOCAB, 2)

    def init(self, key: Any) -> Any:
        return {"table": jax.random.normal(key, (VOCAB, len(self.ids)))}

    def empty(self, make: Any) -> Any:
        return ()

    def observe(self, params: Any, state: Any, tokens: Any, taps: Any, start: Any) -> Any:
        return state

    def propose(
        self, params: Any, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any
    ) -> Any:
        drafts = [anchor]
        for place in range(sampler.num_drafts):
            choice = sampler.sample_one(params["table"][drafts[-1]], place, self.ids)
            drafts.append(self.ids[choice.index])
        return sampler.draft(jnp.stack(drafts[1:], axis=1), choice.finite), state


class WithLoss(OneByOne):
    def loss(self, params: Any, logits: Any, labels: Any, probs: Any) -> Any:
        return 2.0 * (1.0 - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0])


def scored(module: Any, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Return the scores of a drafter's blocks in random rows, these, the blocks and parameters."""
    pair, rng = dj.Pair(Own(), module), np.random.default_rng(seed)
    params = own_engine(module).params
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, 20)), jnp.int32)
    features = target_features(pair, params["target"], tokens, dtype="float32", keep=False)
    anchors = jnp.asarray([[2, 7, 11], [0, 5, 16]], jnp.int32)
    labels = blocks.gather(tokens, blocks.slots(anchors, 4, 20)[:, :, 1:])
    made = drafter.Blocks(anchors, labels, jnp.ones(labels.shape, bool))
    return drafter.scores(pair, params, RECIPE, features, tokens, made), tokens, made, params


def test_scores_are_of_the_logits_by_which_decoding_drafts_at_each_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = Heads(WIDTH, depth=1, places=3)
    found, tokens, made, params = scored(heads)
    pair = dj.Pair(Own(), heads)
    features = target_features(pair, params["target"], tokens, dtype="float32", keep=False)
    for row, place in ((0, 0), (0, 2), (1, 2)):
        at = int(made.anchors[row, place])
        hidden, anchor = features.taps[0][row, at - 1], tokens[row, at]
        arguments = (hidden[None], anchor[None], pair.shared(params))
        [logits] = heads.apply({"params": params["drafter"]}, *arguments, method="logits")
        expected = -jax.nn.log_softmax(logits)[jnp.arange(3), made.labels[row, place]]
        np.testing.assert_allclose(found.nll[row, place], expected, rtol=1e-4)
    monkeypatch.setattr(objective, "LOGIT_ELEMENTS", 1)  # one block at a time
    for one, other in zip(jax.tree.leaves(scored(heads)[0]), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_places_are_scored_one_by_one_among_some_tokens_and_by_a_loss_of_the_drafter() -> None:
    found, tokens, made, params = scored(OneByOne())
    known = np.asarray(made.labels) % 2 == 0
    assert (np.asarray(found.known) == known).all()
    before = np.concatenate([np.asarray(tokens)[[[0], [1]], np.maximum(made.anchors, 1)][..., None],
                             np.asarray(made.labels)[..., :-1]], axis=2)  # fmt: skip
    # The label stands where it is known; the first of the known tokens where it is not.
    before[..., 1:] = np.where(before[..., 1:] % 2, 0, before[..., 1:])
    logits = np.asarray(params["drafter"]["table"])[before]
    expected = -np.asarray(jax.nn.log_softmax(logits))
    label = np.asarray(made.labels)[..., None] // 2
    expected = np.take_along_axis(expected, label, axis=-1)[..., 0]
    np.testing.assert_allclose(np.asarray(found.loss)[known], expected[known], rtol=1e-4)
    assert (np.asarray(found.loss)[~known] == 0).all()
    own = scored(WithLoss())[0]
    chosen = np.take_along_axis(logits, label, axis=-1)[..., 0]
    np.testing.assert_allclose(np.asarray(own.loss)[known], 2 * (1 - chosen[known]), rtol=1e-4)


def test_muon_is_for_matrices_and_not_for_tables() -> None:
    params = {"w": jnp.zeros((3, 4, 5)), "kernel": jnp.zeros((4, 5)), "bias": jnp.zeros(5)}
    tree = {"dense": params, "embed": {"embedding": jnp.zeros((9, 4))}}
    found = of_two_axes(tree)
    assert found["dense"] == {"w": False, "kernel": True, "bias": False}
    assert found["embed"] == {"embedding": False}


class Whole(OneByOne):
    def init(self, key: Any) -> Any:
        return {"table": super().init(key)["table"].astype(jnp.int32)}


class Bare(OneByOne):
    init = None  # pyrefly: ignore

    def propose(self, params: Any, state: Any, anchor: Any, *rest: Any) -> Any:
        return rest[-1].certain(jnp.repeat(anchor[:, None], rest[-1].num_drafts, axis=1)), state


class Scalar(WithLoss):
    def loss(self, params: Any, logits: Any, labels: Any, probs: Any) -> Any:
        return logits.mean()


@pytest.fixture
def nothing_written(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("module", "settings", "error", "message"),
    [
        (Bigram(), [], ConfigError, "Bigram has no parameters; there is nothing to train"),
        (Bare(), [], ConfigError, "Bare has no parameters"),
        (Whole(), [], ConfigError, "table of Whole is int32; expected floats"),
        (Scalar(), [], PlanError, r"Scalar.loss returned float32\[\]; expected floats \[4, 3\]"),
        (None, ["block=8"], PlanError, r"Heads.propose returned .*"),
        (None, ["kind=dflash2"], ConfigError, "kind is 'dflash2', but the drafter is Heads, a mod"),
        (None, ["draft_vocab=8"], ConfigError, "draft_vocab is 8, but the drafter is Heads"),
        (None, ["target_weights=int8"], ConfigError, "Own, a module of your own, declares no matr"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name_before_anything_is_written(
    module: Any, settings: list[str], error: type, message: str, nothing_written: Path
) -> None:
    with pytest.raises(error, match=message):
        train(own_engine(module), dj.recipe("smoke", [*SETTINGS, *settings]), out=nothing_written)


def test_drafts_without_logits_leave_nothing_to_train(nothing_written: Path) -> None:
    class Certain(OneByOne):
        propose = Bare.propose

    with pytest.raises(ConfigError, match=r"Certain.propose chose no drafts from logits, so there"):
        train(own_engine(Certain()), out=nothing_written)


def test_masks_and_kinds_of_recipes_need_what_an_own_target_does_not_say(
    engine: dj.Engine, nothing_written: Path
) -> None:
    with pytest.raises(ConfigError, match=r"mask_id is 3, but Heads, a drafter of your own"):
        train(engine, mask_id=3, out=nothing_written)
    alone = dj.Graph(dj.Pair(Own()), PLAN)
    with pytest.raises(ConfigError, match=r"config, ModelConfig\(.*give an engine with a drafter"):
        train(dj.Engine(alone, engine.params), out=nothing_written)


def test_hooks_are_functions(engine: dj.Engine) -> None:
    with pytest.raises(ConfigError, match=r"on_step is 5; expected a function of one argument"):
        train(engine, on_step=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'on_stop'"):
        train(engine, on_stop=print)


def test_own_modules_are_those_without_a_config_of_a_kind() -> None:
    assert own_modules.is_own(Heads(WIDTH, depth=1, places=3))
    assert not own_modules.is_own(dj.load("tiny").graph.pair.drafter)
