"""Rollouts for Tunix. One test takes the real package; the others its models' vectors."""

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import CheckpointError, ConfigError, Plan, RequestError, TargetModel
from dflash_jax.converters import live
from dflash_jax.engine.engine import Engine
from dflash_jax.graph import Graph, Pair
from dflash_jax.graph.ngram import NGram
from dflash_jax.rollouts import Sampler
from dflash_jax.testing import random_engine
from tests.tunix import CONFIGS

pytestmark = pytest.mark.exhaustive

CONFIG = CONFIGS["qwen3"]
PAD, START, END = 0, 1, 2
LONG = "abcabcabcabcabc"


class Letters:
    """A tokenizer with the members that Tunix expects: a letter is an id."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3 + ord("a")) for i in ids)

    def bos_id(self) -> int:
        return START

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


@dataclasses.dataclass
class Config:
    """The fields of Tunix's `RolloutConfig` that a sampler reads, with its defaults."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    eos_tokens: list[int] | None = None
    return_logprobs: bool = False


@pytest.fixture(scope="module")
def states() -> list[Any]:
    """Two policies, as Tunix's trainer gives them."""
    path = Path(__file__).parent / "oracle" / "tunix" / "qwen3.safetensors"
    arrays = {k: x for k, x in load_file(path).items() if k not in ("tokens", "logits")}
    others = {k: x + 0.3 * np.sin(np.arange(x.size)).reshape(x.shape) for k, x in arrays.items()}
    return [parameters(arrays), parameters(others)]


def parameters(arrays: dict[str, np.ndarray]) -> Any:
    leaves = {path: nnx.Param(jnp.asarray(x, jnp.float32)) for path, x in arrays.items()}
    return nnx.State(live.nested(leaves))


def new_engine() -> Engine:
    plan = Plan(max_length=96, chunk=16, rows=2, block=4, queue=1)
    target = random_engine(CONFIG, None, plan)
    graph = Graph(Pair(target=target.graph.pair.target, drafter=NGram()), plan)
    return Engine(graph, graph.place_params(target.params | {"drafter": {}}))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine()


@pytest.fixture
def sampler(engine: Engine, states: list[Any]) -> Sampler:
    made = Sampler(engine, Letters())
    made.update_params(states[0], (nnx.Param,))
    return made


def test_answers_are_drafted_and_those_of_the_policy(sampler: Sampler, states: list[Any]) -> None:
    for state in states:
        sampler.update_params(state)
        model = TargetModel(CONFIG, live.from_arrays(state, CONFIG), "float32")
        found = sampler([LONG, "xy"], 24)
        for prompt, tokens in zip(found.padded_prompt_tokens, found.tokens, strict=True):
            ids = [int(token) for token in prompt if token != PAD]
            logits = model.forward([[*ids, *tokens.tolist()]]).logits[0]
            assert logits[len(ids) - 1 : -1].argmax(axis=-1).tolist() == tokens.tolist()
        assert found.text == [Letters().decode(tokens.tolist()) for tokens in found.tokens]
    drafted = sampler.engine.generate(sampler.tokenize(LONG), max_tokens=24).stats
    assert drafted.drafted


def test_no_program_is_compiled_for_another_policy(sampler: Sampler, states: list[Any]) -> None:
    config = Config(max_tokens_to_generate=12, max_prompt_length=20, seed=jax.random.key(5))
    first = sampler.generate([LONG, LONG, "xy"], config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.engine.core.runner.compiled, "build", None)
        sampler.update_params(states[1])
        other = sampler.generate([LONG, LONG, "xy"], config)
    new = new_engine()
    new.share_programs(sampler.engine)
    fresh = Sampler(new, Letters(), rollout_actor=states[1])
    again = fresh.generate([LONG, LONG, "xy"], config)
    assert [x.tolist() for x in other.tokens] == [x.tolist() for x in again.tokens]
    assert [x.tolist() for x in other.tokens] != [x.tolist() for x in first.tokens]
    kept, wanted = fresh.transformer_state, nnx.to_pure_dict(states[1])
    jax.tree.map(np.testing.assert_array_equal, kept, wanted)


def test_shapes_seeds_and_probabilities_are_those_that_a_trainer_expects(sampler: Sampler) -> None:
    config = Config(max_tokens_to_generate=10, max_prompt_length=18, return_logprobs=True)
    config = dataclasses.replace(config, seed=7, temperature=1.0)
    found = sampler.generate([LONG] * 3 + ["xy"], config)
    assert found.left_padded_prompt_tokens.shape == (4, 18)
    assert found.left_padded_prompt_tokens[3].tolist() == [0] * 15 + [START, 26, 27]
    assert len({tuple(tokens) for tokens in found.tokens[:3]}) == 3  # other seeds, one prompt
    again = sampler.generate([LONG] * 3 + ["xy"], config)
    assert [x.tolist() for x in again.tokens] == [x.tolist() for x in found.tokens]
    padded = sampler([LONG, "xy"], 10, 18, pad_output=True, return_logprobs=True, multi_sampling=2)
    assert np.shape(padded.tokens) == np.shape(padded.logprobs) == (4, 10)
    assert found.logprobs is not None
    answers = np.full((4, 12), PAD, np.int32)
    for row, tokens in zip(answers, found.tokens, strict=True):
        row[: len(tokens)] = tokens
    logps = sampler.get_per_token_logps(found.left_padded_prompt_tokens, jnp.asarray(answers))
    assert logps.shape == (4, 12)
    for row, tokens, wanted in zip(logps, found.tokens, found.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(tokens)], wanted, atol=1e-4)
        assert not row[len(tokens) :].any()


def test_an_answer_ends_before_its_end_token(sampler: Sampler) -> None:
    whole = sampler([LONG], 20).tokens[0].tolist()
    ended = sampler([LONG], 20, eos_tokens=[whole[4]]).tokens[0].tolist()
    assert ended == whole[: whole.index(whole[4])]


def test_what_the_engine_cannot_do_is_refused_by_name(sampler: Sampler, states: list[Any]) -> None:
    for options, message in (
        ({"beam_size": 2}, "beam_size is 2; the engine draws answers without it"),
        ({"return_logits": True}, "return_logits is True"),
        ({"images": []}, "images is unknown; expected temperature"),
        ({"max_prompt_length": 3}, "a prompt has 16 tokens; expected 3 or fewer"),
        ({"top_p": 1.5}, "top_p"),
    ):
        with pytest.raises(RequestError, match=message):
            sampler([LONG], 5, **options)
    before = sampler.engine.params
    pure = nnx.to_pure_dict(states[1])
    for damaged, message in (
        ({k: x for k, x in pure.items() if k != "lm_head"}, "missing: lm_head/w"),
        (pure | {"lora": {"w_lora_a": np.ones((2, 2), np.float32)}}, "left over: lora/w_lora_a"),
        (pure | {"lm_head": {"w": np.ones((16, 61), np.int8)}}, "wrong type: lm_head"),
    ):
        with pytest.raises(CheckpointError, match=message):
            sampler.update_params(damaged)
    assert sampler.engine.params is before
    with pytest.raises(ConfigError, match="the engine has no tokenizer; give the one of Tunix"):
        Sampler(sampler.engine)


def test_tunix_takes_the_sampler(engine: Engine) -> None:
    """Its cluster answers by it and synchronises weights; its own sampler has the same tokens."""
    pytest.importorskip("tunix", reason="google-tunix is not installed")
    import optax
    from tunix.generate import base_sampler
    from tunix.generate import sampler as tunix_sampler
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_cluster
    from tunix.rl.rollout import base_rollout

    for base in (base_sampler.BaseSampler, base_rollout.BaseRollout):
        for name in base.__abstractmethods__ - {"__init__"}:
            declared, own = getattr(base, name), getattr(Sampler, name)
            assert callable(own) == callable(declared), name
    base_rollout.BaseRollout.register(Sampler)
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=61,
        embed_dim=16,
        hidden_dim=24,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-5,
    )
    actor = qwen3.Qwen3(config, rngs=nnx.Rngs(3))
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=axes)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                rl_cluster.Role.ACTOR: mesh,
                rl_cluster.Role.REFERENCE: mesh,
                rl_cluster.Role.ROLLOUT: mesh,
            },
            rollout_engine=functools.partial(Sampler, engine=engine),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(0.1), eval_every_n_steps=10, max_steps=4
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=16, max_prompt_length=16, kv_cache_size=64, temperature=0.0
            ),
        ),
    )
    assert isinstance(cluster.rollout, Sampler)

    def wanted() -> list[list[int]]:
        cache = tunix_sampler.CacheConfig(64, 2, 2, 8)
        made = tunix_sampler.Sampler(cluster.actor_trainer.model, Letters(), cache)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            found = made([LONG, "xy"], max_generation_steps=16, max_prompt_length=16)
        return [tokens.tolist() for tokens in found.tokens]

    first = cluster.generate([LONG, "xy"])
    assert [tokens.tolist() for tokens in first.tokens] == wanted()
    trained = cluster.actor_trainer.model
    nnx.update(trained, jax.tree.map(lambda x: x * 1.5 + 0.01, nnx.state(trained, nnx.Param)))
    cluster.sync_weights()
    second = cluster.generate([LONG, "xy"])
    assert [tokens.tolist() for tokens in second.tokens] == wanted()
    assert [x.tolist() for x in second.tokens] != [x.tolist() for x in first.tokens]
    logps = cluster.get_old_per_token_logps(
        jnp.asarray(second.left_padded_prompt_tokens), jnp.asarray(np.stack(second.tokens))
    )
    assert np.isfinite(logps).all()
    assert inspect.signature(Sampler.generate).parameters.keys() >= {"prompts", "rollout_config"}
