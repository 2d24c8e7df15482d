"""Training of drafters that are modules of a user's own, through the members that decode.

`observe` gets a whole row at once, `commit` keeps the tokens before an anchor, and `propose` drafts
after it with a sampler that keeps the logits and chooses the labels. So what is trained is what
drafts, and a drafter needs no member for training; one named `loss` replaces the recipe's loss.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import DrafterConfig
from dflash_jax.errors import ConfigError
from dflash_jax.graph import Graph
from dflash_jax.graph.abstract import by_path, drafter_caches
from dflash_jax.graph.protocols import Draft, DraftChoice
from dflash_jax.graph.protocols import commit as committed
from dflash_jax.graph.steps.pair import Observed, Pair, expect_floats
from dflash_jax.nn.objective import Scores, cross_entropy, distance, is_argmax, scores_of
from dflash_jax.plan import LEAST, Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer import blocks as anchoring
from dflash_jax.trainer import objective
from dflash_jax.trainer.features import TargetFeatures
from dflash_jax.trainer.recipes import DFLASH, FLOAT, Recipe
from dflash_jax.trainer.trained import TrainedDrafter


def is_own(drafter: Any) -> bool:
    """Return whether a drafter is a module of a user's own, not one of a kind with a config."""
    return not isinstance(getattr(drafter, "config", None), DrafterConfig)


def check(pair: Pair, recipe: Recipe, model: TargetModel) -> None:
    """Check that a recipe trains a module of a user's own, and that the module drafts.

    Raises:
      ConfigError: a setting is of the kinds of dflash_jax.
      PlanError: a member fails, or returns something else than a graph needs.
    """
    name = type(pair.drafter).__name__
    settings = {"kind": DFLASH, "draft_vocab": 0, "frozen_backbone": False}
    for setting, default in settings.items():
        if (value := getattr(recipe, setting)) != default:
            raise ConfigError(
                f"{setting} is {value!r}, but the drafter is {name}, a module of your own; leave"
                f" {setting} at {default!r}, or give an engine without that drafter"
            )
    length = min(recipe.buckets[0].length, model.config.max_length)
    Graph(pair, Plan(max_length=length, block=recipe.block, dtype=model.dtype, exact=False))


def check_target(model: TargetModel, recipe: Recipe) -> None:
    """Raise ConfigError if a target's matrices are to be rounded, and it does not declare them."""
    if recipe.target_weights != FLOAT:
        raise ConfigError(
            f"target_weights is {recipe.target_weights!r}, but {type(model.module).__name__}, a"
            " module of your own, declares no matrices that may be packed; use float"
        )


def first_params(start: TrainedDrafter) -> Any:
    """Return the parameters before the first step, in float32.

    Raises:
      ConfigError: there are none, or one has no floats.
    """
    name = type(start.module).__name__
    leaves = by_path(start.params)
    if not leaves:
        raise ConfigError(f"the drafter {name} has no parameters; there is nothing to train")
    for path, x in leaves.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(
                f"the parameter {path} of {name} is {x.dtype}; expected floats: make it an"
                " attribute, or a variable of another type than nnx.Param"
            )
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), start.params)


class LabelSampler:
    """A `protocols.DraftSampler` that chooses the labels, and keeps the logits that it gets.

    Attributes:
      together: logits of all positions and the token of each logit, if they were chosen at once.
      alone: logits and tokens of each position that was chosen by itself.
    """

    keeps_logits = True

    def __init__(self, labels: Int[Array, "B R"], anchor: Int[Array, " B"]):
        self.labels = labels
        self.anchor = anchor
        self.together: tuple[Array, Array | None] | None = None
        self.alone: dict[int, tuple[Array, Array | None]] = {}

    @property
    def num_drafts(self) -> int:
        """Number of drafts of a block."""
        return self.labels.shape[1]

    @property
    def idle(self) -> Bool[Array, " B"]:
        """No row is idle."""
        return jnp.zeros(self.anchor.shape, bool)

    def sample_all(
        self, logits: Float[Array, "B R N"], ids: Int[Array, " N"] | None = None
    ) -> DraftChoice:
        """Choose the label of each position."""
        self.together = logits, ids
        index, _ = among(self.labels[:, : logits.shape[1]], logits, ids)
        return DraftChoice(index, jnp.ones(self.anchor.shape, bool))

    def sample_one(
        self, logits: Float[Array, "B N"], at: int, ids: Int[Array, "*rows N"] | None = None
    ) -> DraftChoice:
        """Choose the label of one position."""
        self.alone[at] = logits, ids
        index, _ = among(self.labels[:, at], logits, ids)
        return DraftChoice(index, jnp.ones(self.anchor.shape, bool))

    def draft(
        self,
        tokens: Int[Array, "B R"],
        finite: Bool[Array, " B"],
        *,
        confidence: Float[Array, "B R"] | None = None,
        logits: Float[Array, "B R N"] | None = None,
        ids: Int[Array, "*positions N"] | None = None,
    ) -> Draft:
        """Assemble a draft; logits that are given with it are those of its positions."""
        if logits is not None:
            self.together = logits, ids
        return Draft(jnp.concatenate([self.anchor[:, None], tokens], axis=1), finite)

    def certain(self, tokens: Int[Array, "B R"], count: Int[Array, " B"] | None = None) -> Draft:
        """Draft these tokens."""
        return self.draft(tokens, jnp.ones(self.anchor.shape, bool))

    def kept(self, drafter: Any) -> tuple[Float[Array, "B R N"], Int[Array, "..."] | None]:
        """Return the logits of all positions, and the token of each if that is not its index.

        Raises:
          ConfigError: the drafter chose a position without the sampler.
          PlanError: its logits have another shape.
        """
        kept = self.together
        if kept is None and [*self.alone] == [*range(self.num_drafts)]:
            logits = jnp.stack([x for x, _ in self.alone.values()], axis=1)
            named = [jnp.broadcast_to(i, x.shape) for x, i in self.alone.values() if i is not None]
            kept = (logits, jnp.stack(named, axis=1) if named else None)
        if kept is None:
            raise ConfigError(
                f"{type(drafter).__name__}.propose chose no drafts from logits, so there is nothing"
                " to train; expected sampler.sample_all(logits), sampler.sample_one(logits, at)"
                " for each position, or sampler.draft(tokens, finite, logits=logits). An engine"
                " without this drafter trains one of the recipe's kind"
            )
        shape = (*self.labels.shape, kept[0].shape[-1])
        expect_floats(drafter, "propose as logits", kept[0], shape, "B, places, N")
        return kept


def among(
    labels: Int[Array, "B *positions"],
    logits: Float[Array, "B *positions N"],
    ids: Int[Array, "..."] | None,
) -> tuple[Int[Array, "B *positions"], Bool[Array, "B *positions"] | None]:
    """Return the index of each label among logits, and whether it is there; None if all are.

    Args:
      ids: the token of each logit; None if it is the index.
    """
    if ids is None:
        return labels, None
    same = jnp.broadcast_to(ids, logits.shape) == labels[..., None]
    return jnp.argmax(same, axis=-1).astype(labels.dtype), same.any(axis=-1)


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The labels of a block's places, and the target's distributions there, if asked for."""

    labels: Int[Array, "B R"]
    probs: Float[Array, "B R V"] | None
    counts: Bool[Array, "B R"]


def scores(
    pair: Pair,
    params: dict[str, Any],
    recipe: Recipe,
    features: TargetFeatures,
    tokens: Int[Array, "B S"],
    places: Sequence[Array],
) -> Scores:
    """Return the scores [B, N, R] of all drafted places of a user's own drafter.

    Args:
      places: anchors [B, N], labels [B, N, R], and which of these count.
    """
    rows, length = tokens.shape
    dtype = recipe.training_dtype
    plan = dataclasses.replace(
        LEAST,
        block=recipe.block,
        rows=rows,
        max_length=length,
        chunk=length,
        dtype=dtype,  # pyrefly: ignore
    )
    empty = pair.drafter.empty(drafter_caches(pair, plan))
    taps = tuple(tap.astype(dtype) for tap in features.taps)
    observed = pair.observe(params, empty, Observed(tokens, taps), jnp.zeros(rows, jnp.int32))

    def block(anchor: Array, labels: Array, counts: Array) -> Scores:
        first = jnp.take_along_axis(tokens, anchor[:, None], axis=1)[:, 0]
        state = committed(pair.drafter, observed, anchor)
        sampler = LabelSampler(labels, first)
        pair.drafter_call(
            params, state, first, anchor, pair.shared(params), sampler, method="propose"
        )
        probs = None
        if features.hidden is not None:
            before = anchoring.slots(anchor[:, None], labels.shape[1], length)[:, 0]
            hidden = jnp.take_along_axis(features.hidden, before[:, :, None], axis=1)
            probs = jax.nn.softmax(pair.target_call(params, hidden, method="logits"), axis=-1)
        return scored(pair, params, recipe, sampler, Teacher(labels, probs, counts))

    anchors, labels, counts = places
    anchors = jnp.maximum(anchors, 1)  # dead ones are at 0, where nothing was observed
    elements = rows * labels[0].size * pair.target.config.vocab_size
    parts = objective.fewest_parts(anchors.shape[1], elements, objective.LOGIT_ELEMENTS)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, parts, -1, *x.shape[2:]), 1, 0)

    def some(chunk: Sequence[Array]) -> Scores:
        return jax.vmap(block, in_axes=1, out_axes=1)(*chunk)

    if parts == 1:
        return some((anchors, labels, counts))
    mapped = jax.lax.map(jax.checkpoint(some), jax.tree.map(cut, (anchors, labels, counts)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(labels.shape), mapped)


def scored(
    pair: Pair,
    params: dict[str, Any],
    recipe: Recipe,
    sampler: LabelSampler,
    teacher: Teacher,
) -> Scores:
    """Return the scores [B, R] of the logits that a sampler kept."""
    drafter = pair.drafter
    logits, ids = sampler.kept(drafter)
    logits = logits.astype(jnp.float32)
    index, known = among(teacher.labels, logits, ids)
    probs = teacher.probs
    if probs is not None and ids is not None:
        probs = jnp.take_along_axis(probs, jnp.broadcast_to(ids, logits.shape), axis=-1)
    nll = cross_entropy(logits, index)
    if hasattr(drafter, "loss"):
        loss = pair.drafter_call(params, logits, index, probs, method="loss")
        expect_floats(drafter, "loss", loss, index.shape, "B, places")
    else:
        loss = distance(recipe.loss, logits, nll, probs)
    counts = teacher.counts if known is None else teacher.counts & known
    return scores_of(
        known,
        loss=jnp.where(counts, loss, 0.0),
        nll=nll,
        right=is_argmax(logits, index),
        head=jnp.zeros_like(nll),
        head_counts=jnp.zeros(nll.shape, bool),
    )
