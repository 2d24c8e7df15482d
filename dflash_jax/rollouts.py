"""Drafted rollouts for Tunix: an engine with the members of its samplers and rollout workers.

Tunix is not imported: `Sampler` has the members that `tunix.generate.base_sampler.BaseSampler` and
`tunix.rl.rollout.base_rollout.BaseRollout` of google-tunix 0.1.7 declare.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.result import Result
from dflash_jax.errors import ConfigError, QueueFullError, RequestError


@dataclasses.dataclass
class Rollouts:
    """Answers, with the fields of Tunix's `SamplerOutput` and `RolloutOutput`."""

    text: list[str]
    logits: None  # drafted steps keep none
    tokens: list[np.ndarray]  # without the end token
    padded_prompt_tokens: np.ndarray
    logprobs: list[list[float]] | None

    @property
    def left_padded_prompt_tokens(self) -> np.ndarray:
        """The prompts, padded on the left to one length."""
        return self.padded_prompt_tokens


class Sampler:
    """An engine as Tunix's sampler and rollout worker, whose answers are drafted and lossless.

    Tokens are those of plain decoding with the same weights and seeds. `RLCluster` takes it as

        base_rollout.BaseRollout.register(Sampler)
        ClusterConfig(rollout_engine=functools.partial(Sampler, engine=engine), ...)

    Args:
      engine: its target has the architecture of the policy. The drafter may be any.
      tokenizer: has Tunix's `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`; None is the
        engine's own.
      rollout_actor: a Flax NNX module or its state, whose parameters the engine takes at once.
      mesh, rollout_config: given by Tunix, and not used.
      seed: seeds of requests are drawn from it where a call gives none.

    Raises:
      ConfigError: the target is none that Tunix has, or there is no tokenizer.
      CheckpointError: the parameters of `rollout_actor` do not fit.
    """

    mesh = None  # the engine has its own devices

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any = None,
        *,
        rollout_actor: Any = None,
        mesh: Any = None,
        rollout_config: Any = None,
        seed: int = 0,
    ):
        config = engine.graph.config
        if not isinstance(config, TargetConfig):
            raise ConfigError(f"{type(config).__name__} is no config of a target of ours")
        if tokenizer is None and engine.tokenizer is None:
            raise ConfigError("the engine has no tokenizer; give the one of Tunix's trainer")
        self.engine = engine
        self.config = config
        self.tokenizer = tokenizer
        self._random = np.random.default_rng(seed)
        if rollout_actor is not None:
            self.update_params(rollout_actor)

    # Members of a sampler
    @property
    def transformer(self) -> None:
        """None: the engine's weights are its own, and have to be synchronised."""
        return

    @property
    def transformer_state(self) -> dict[str, Any]:
        """The target's parameters by Tunix's names, copied to the host."""
        from dflash_jax.converters import live

        return live.to_arrays(self.engine.params["target"], self.config, naming="tunix")

    def tokenize(self, input_string: str) -> list[int]:
        """Return the ids of a text, with the start token."""
        if self.tokenizer is None and self.engine.tokenizer is not None:
            return self.engine.tokenizer.encode(input_string)
        ids = [*self.tokenizer.encode(input_string)]
        start = self.tokenizer.bos_id()
        return [start, *ids] if start and ids[:1] != [start] else ids

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        **options: Any,
    ) -> Rollouts:
        """Answer prompts.

        Args:
          input_strings: one text or several. Equal ones draw with different seeds.
          max_generation_steps: most tokens of an answer.
          max_prompt_length: the length to which `padded_prompt_tokens` are padded.
          options: temperature, top_p, top_k, seed (an integer or a key of JAX), eos_tokens,
            multi_sampling (answers per text, next to each other), pad_output (pad tokens to
            `max_generation_steps`) and return_logprobs; beam_size, echo and return_logits have to
            be off.

        Raises:
          RequestError: an option is unknown or not supported, or a prompt is too long.
        """
        texts = [input_strings] if isinstance(input_strings, str) else [*input_strings]
        chosen = SamplerOptions(**_known(options))
        chosen.refuse_unsupported()
        prompts: list[list[int]] = []
        for text in texts:
            prompts += [self.tokenize(text)] * chosen.multi_sampling
        padded = self._padded(prompts, max_prompt_length)
        ends = [*(chosen.eos_tokens or (self.eos_id(),))]
        seeds = self._seeds(chosen.seed, len(prompts))
        requests = [
            {
                "prompt": prompt,
                "max_tokens": max_generation_steps,
                "temperature": float(chosen.temperature),
                "top_p": 1.0 if chosen.top_p is None else chosen.top_p,
                "top_k": chosen.top_k or 0,
                "stop_token_ids": ends,
                "seed": seed,
                "logprobs": 0 if chosen.return_logprobs else None,
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        results = self._answers(requests)
        tokens = [self._without_end(result.token_ids, ends) for result in results]
        logprobs = [
            [0.0 if x.logprob is None else x.logprob for x in (result.logprobs or ())[: len(ids)]]
            for result, ids in zip(results, tokens, strict=True)
        ]
        arrays = [np.asarray(ids, np.int32) for ids in tokens]
        if chosen.pad_output:
            pads = [(0, max_generation_steps - len(ids)) for ids in tokens]
            fill = self.pad_id()
            arrays = [
                np.pad(x, pad, constant_values=fill) for x, pad in zip(arrays, pads, strict=True)
            ]
            logprobs = [
                x + [0.0] * pad[1] if x else [] for x, pad in zip(logprobs, pads, strict=True)
            ]
        tokenizer: Any = self.tokenizer or self.engine.tokenizer
        return Rollouts(
            text=[tokenizer.decode(ids) for ids in tokens],
            logits=None,
            tokens=arrays,
            padded_prompt_tokens=padded,
            logprobs=logprobs if chosen.return_logprobs else None,
        )

    def _padded(
        self, prompts: Sequence[Sequence[int]], length: int | None
    ) -> Int[np.ndarray, "N T"]:
        """Return prompts that are padded before their first token, to the longest by default.

        Raises:
          RequestError: a prompt is longer than `length`.
        """
        longest = max(map(len, prompts), default=0)
        if length is None or length == 0:
            length = longest
        if longest > length:
            raise RequestError(f"a prompt has {longest} tokens; expected {length} or fewer")
        padded = np.full((len(prompts), length), self.pad_id(), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[length - len(prompt) :] = prompt
        return padded

    # Members of a rollout worker
    def generate(self, prompts: list[str], rollout_config: Any, **options: Any) -> Rollouts:
        """Answer prompts as Tunix's `RolloutConfig` says."""
        names = ("temperature", "top_p", "top_k", "seed", "eos_tokens", "return_logprobs")
        return self(
            prompts,
            rollout_config.max_tokens_to_generate,
            rollout_config.max_prompt_length,
            **{name: getattr(rollout_config, name) for name in names} | options,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Return the logarithms of the policy's probabilities of given answers, [B, C].

        They are those at temperature 1, and 0 where an answer is padded.

        Args:
          prompt_tokens: ids [B, P], padded on the left.
          completion_tokens: ids [B, C], padded on the right.
        """
        pad = self.pad_id()
        logprobs = np.zeros(np.shape(completion_tokens), np.float32)
        requests = []
        lengths = []
        for left, right in zip(
            np.asarray(prompt_tokens), np.asarray(completion_tokens), strict=True
        ):
            prompt = left[int(np.argmax(left != pad)) :].tolist()
            answer = right[: len(right) - int(np.argmax(right[::-1] != pad))].tolist()
            answer = answer if (right != pad).any() else []
            lengths.append(len(answer))
            requests.append({"prompt": prompt + answer, "max_tokens": 1, "prompt_logprobs": 0})
        for row, length, result in zip(logprobs, lengths, self._answers(requests), strict=True):
            values = [x.logprob or 0.0 for x in result.prompt_logprobs or ()]
            row[:length] = values[len(values) - length :]
        return jnp.asarray(logprobs)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Give the engine the parameters of a policy; compiles nothing.

        Args:
          params: a Flax NNX module or its state, of Tunix or MaxText, or arrays by Hugging Face's
            names.
          filter_types: given by Tunix, and not used.

        Raises:
          CheckpointError: parameters are missing, unknown (such as those of LoRA, which have to be
            merged before) or of another shape. The engine keeps its own.
          ConfigError: the target's family is none of the library's.
          RequestError: requests are running.
        """
        from flax import nnx

        from dflash_jax.converters import live

        state = nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params
        # Tunix forbids transfers while it synchronises weights on a CPU.
        with jax.transfer_guard("allow"):
            target = live.from_arrays(state, self.config, dtype=self.engine.plan.dtype)
            self.engine.update_params({"target": target})

    def pad_id(self) -> int:
        """Return the id that pads prompts and answers."""
        return self.eos_id() if self.tokenizer is None else self.tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the id that ends answers."""
        return self.config.eos_token_ids[0] if self.tokenizer is None else self.tokenizer.eos_id()

    def model(self) -> None:
        """Return None: Tunix then synchronises weights by `update_params`."""
        return

    def _answers(self, requests: Iterable[dict[str, Any]]) -> list[Result]:
        """Return the results of requests, of which as many wait as the plan allows."""
        handles: list[RequestHandle] = []
        waiting: deque[RequestHandle] = deque()
        for request in requests:
            while True:
                try:
                    handle = self.engine.submit(**request)
                    break
                except QueueFullError:
                    waiting.popleft().result()
            handles.append(handle)
            waiting.append(handle)
        return [handle.result() for handle in handles]

    def _seeds(self, seed: Any, count: int) -> list[int]:
        """Return a seed for every request: of the call's seed, or the next of this sampler."""
        random = self._random
        if seed is not None:
            key = hasattr(seed, "dtype") and jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key)
            words = np.asarray(jax.random.key_data(seed) if key else seed).ravel()
            random = np.random.default_rng([int(word) for word in words])
        return [int(x) for x in random.integers(0, 2**63, count)]

    def _without_end(self, ids: list[int], ends: list[int]) -> list[int]:
        end_ids = {*ends, *self.config.eos_token_ids}
        return ids[:-1] if ids and ids[-1] in end_ids else ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Options of a call, with Tunix's names and defaults."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: Any = None
    eos_tokens: Sequence[int] | None = None
    multi_sampling: int = 1
    pad_output: bool = False
    return_logprobs: bool = False
    beam_size: int | None = None
    echo: bool = False
    return_logits: bool = False

    def refuse_unsupported(self) -> None:
        """Raise RequestError about the first option that the engine does not have."""
        for name in ("beam_size", "echo", "return_logits"):
            if value := getattr(self, name):
                raise RequestError(f"{name} is {value}; the engine draws answers without it")


def _known(options: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(SamplerOptions)]
    if unknown := [name for name in options if name not in names]:
        raise RequestError(f"{unknown[0]} is unknown; expected {', '.join(names)}")
    return options
