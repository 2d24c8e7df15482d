"""Hidden states of a target while it answers, as arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import numpy as np
from jaxtyping import Float

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Prompt
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingOptions, SamplingParams
from dflash_jax.errors import RequestError
from dflash_jax.graph import Graph, Pair
from dflash_jax.trainer.decoding import Taps, decode
from dflash_jax.trainer.recorder import Recorder


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """An answer and the target's hidden states.

    Attributes:
      result: the answer, decoded without drafts.
      token_ids: tokens of prompt and answer, except the last one, which no step was fed.
      hidden: the hidden states of these tokens, in the order of `taps`.
      taps: 0 is the input of layer 0, i + 1 the output of layer i.
    """

    result: Result
    token_ids: list[int]
    hidden: Float[np.ndarray, "N T D"]
    taps: tuple[int, ...]


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    taps: Sequence[int] | None = None,
    **options: Unpack[SamplingOptions],
) -> list[Recorded]:
    """Answer prompts as an engine does, and return the target's hidden states, in float32.

    They are those of the steps that decode the answers, in the plan's dtype. No drafts are made:
    they change no token of an exact plan. With its taps as outputs, a step may round otherwise in
    last bits.

    Args:
      engine: whose target and plan are used; it may answer other requests meanwhile.
      prompts: texts, or lists of token ids.
      taps: hidden states to return; by default all, from the input of layer 0 to the output of the
        last layer. Each takes a cache of its own.
      options: fields of `dj.SamplingParams`.

    Raises:
      RequestError: a prompt cannot be served, there is no such layer, or the engine has int8
        caches, or several devices.
      PlanError: the caches do not fit the memory.
    """
    if not isinstance(engine, Engine):
        raise RequestError(f"engine is a {type(engine).__name__}; expected one of `dj.load`")
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is {prompts!r}; expected a list of texts or of ids")
    chosen = checked(engine, taps)
    plain: SamplingOptions = {**options, "speculative": False}
    params = SamplingParams.of(None, plain)
    handles = [engine.prepare(prompt, params)[0] for prompt in prompts]
    asked = [([*handle.sequence.request.prompt], params) for handle in handles]
    hidden: dict[int, Float[np.ndarray, "N T D"]] = {}

    def ended(number: int, read: Taps) -> None:
        hidden[number] = read()

    with recorder(engine, chosen) as recording:
        results = decode(recording, asked, ended)
    return [
        Recorded(result, [*ids, *result.token_ids][: hidden[i].shape[1]], hidden[i], chosen)
        for i, ((ids, _), result) in enumerate(zip(asked, results, strict=True))
    ]


def checked(engine: Engine, taps: Sequence[int] | None) -> tuple[int, ...]:
    """Return the taps to record.

    Raises:
      RequestError: see `record`.
    """
    plan = engine.plan
    last = engine.graph.config.num_layers
    every = range(last + 1)
    chosen = tuple(every) if taps is None else taps
    known = isinstance(chosen, list | tuple) and len(chosen) > 0
    if not known or any(type(tap) is not int or tap not in every for tap in chosen):
        raise RequestError(
            f"taps is {taps!r}; expected integers from 0, the input of layer 0, to {last}, the"
            f" output of the last of {last} layers"
        )
    if plan.kv_dtype != "auto":
        raise RequestError(f"kv_dtype is {plan.kv_dtype!r}, which rounds what is kept; use auto")
    if plan.two_devices or plan.mesh != (1, 1):
        raise RequestError("the engine has several devices; expected a single one")
    return tuple(chosen)


def recorder(engine: Engine, taps: tuple[int, ...]) -> Engine:
    """Return an engine of the same target whose drafter keeps taps, and drafts nothing."""
    pair = Pair(engine.graph.pair.target, Recorder(taps, engine.graph.config.hidden_size))
    plan = dataclasses.replace(  # nothing is drafted, and prefixes have no taps
        engine.plan,
        draft_window=0,
        ngram=0,
        confidence_threshold=0.0,
        report_top=0,
        report_drafts=False,
        prefix_cache=0,
        prefix_folder="",
    )
    graph = Graph(pair, plan)
    params = {"target": engine.params["target"], "drafter": {}}
    return Engine(graph, params, tokenizer=engine.tokenizer)
