"""The two interfaces that a graph is built on: a target and a drafter.

Both may be Flax modules, Linen or NNX, or plain objects with pure functions. Methods of a Linen
module are run by its `apply`, those of an NNX module by a copy of it with the parameters in place
of its `nnx.Param` variables; they take the arguments below. Those of a plain object take its
parameters first, such as `propose(params, state, anchor, ...)`, and an optional `init(key)` makes
the parameters. Optional members may be absent. `dj.graph.check` tests the obligations of a target
bit by bit.

A target decides tokens, so its numbers must be reproducible: a token's bits must not depend on
later tokens of its block, on other rows, or on where a block begins, and slots at or past a row's
position must be read through a mask only. A drafter decides nothing: wrong, missing or non-finite
drafts cost speed, never a token.

Letters: B rows, T tokens of a call, D width, V vocabulary, R = T - 1 drafted positions of a block,
N tokens that a position chooses from.
"""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.errors import DFlashError, PlanError
from dflash_jax.kernels.caches import (
    ConvCache,
    LayerCache,
    RecurrentCache,
    Update,
    has_caches,
    put_part,
    take_part,
)
from dflash_jax.quant.layouts import FLOAT


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What steps need to know of a target. Any object with these attributes will do."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...] = ()
    max_length: int = 1 << 20


class CacheMaker(Protocol):
    """Makes the state of layers, with the rows, slots and dtype of a plan."""

    @property
    def rows(self) -> int:
        """Number of rows B."""
        ...

    @property
    def slots(self) -> int:
        """Positions of a row, and room for the widest call after them."""
        ...

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of activations."""
        ...

    def __call__(self, kv_heads: int, head_dim: int, window: int | None) -> LayerCache:
        """Return the cache of an attention layer; a ring if the window makes it smaller."""
        ...

    def recurrent(self, state: tuple[int, int, int], inputs: tuple[int, int]) -> RecurrentCache:
        """Return the cache of a recurrent layer: its state [N, P, Q] and inputs [W, C]."""
        ...

    def conv(self, inputs: tuple[int, int]) -> ConvCache:
        """Return the cache of a layer that is a convolution only: its inputs [W, C]."""
        ...


WEIGHTS = "weights"  # the collection of `WeightInfo` values, with the paths of parameters


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WeightInfo:
    """How a weight may be stored, declared by `nn.layers.weight` in the collection `WEIGHTS`."""

    split: int | None = None  # the axis that the devices of a mesh may split
    form: str = FLOAT  # a form of `quant.layouts`: whether it is quantised and laid out for kernels


# -- the target ------------------------------------------------------------------------------------


@struct.dataclass
class TargetOutput:
    """Result of a forward pass over T tokens. Nothing is committed yet."""

    hidden: Float[Array, "B T D"]  # the input of `logits`
    taps: tuple[Float[Array, "B T D"], ...]
    caches: tuple[Update, ...]  # `LayerCache`s, or objects with `commit(num_committed)`


class Target(Protocol):
    """A language model with caches.

    Optional members:
      raw_logits(hidden): logits before a softcap, which drafters use in place of `logits`.
      shared_layers(): a target with the embedding and head alone, and the names of its top
        parameters; a drafter on a device of its own needs a copy of these. By default of all.
      width_invariant: whether a token has the same bits in calls of every width, so that plain
        steps of exact plans may be one token wide. By default they are as wide as blocks.
      kernels: a field of a Linen module, which a graph sets to `Plan.kernels`.
      __call__(..., num_live): the first tokens of each row that count [B]; the others may be
        computed as anything finite. Native kernels skip tokens whose hidden states are zeros.
      logits(..., num_live): the same; the logits of the others may be anything.
    """

    @property
    def config(self) -> Any:
        """A `ModelConfig`, or an object with its attributes."""
        ...

    def empty_caches(self, make: CacheMaker) -> tuple[Any, ...]:
        """Return the caches of all layers, before any token.

        Each is made by `make`, or is a pytree of arrays [B, ...] with methods `commit` and
        `restart` (see `LayerCache`). It is called without parameters. Only shapes and dtypes
        count: a new state is zeros.
        """
        ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        caches: Sequence[Any],
        start: Int[Array, " B"],
        *,
        taps: tuple[int, ...] = (),
        taps_at: str = "late",
        chunked: bool = False,
    ) -> TargetOutput:
        """Run T tokens at positions start .. start+T-1 of each row.

        Args:
          taps: which hidden states to return: 0 is the input of layer 0, i+1 the output of layer i.
          taps_at: variants of where in a layer they are taken; most targets may ignore it.
          chunked: recurrent layers may process the tokens in chunks; others ignore it.
        """
        ...

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return embeddings, for drafters that use the target's table."""
        ...

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return float32 logits."""
        ...


# -- the drafter -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SharedLayers:
    """The target's embedding and head, as a drafter uses them."""

    embed: Callable[[Int[Array, "B T"]], Float[Array, "B T D"]]
    head: Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]]


@struct.dataclass
class Draft:
    """A block for the target to verify.

    In a plain step only the anchor counts: the rest of the block is padding and the other fields
    are None. Where `finite` is False, none of the drafts is verified.
    """

    block: Int[Array, "B T"]  # the anchor, then R = T - 1 drafts
    finite: Bool[Array, " B"] | None = None  # whether the drafter's numbers were; None if so
    num_drafts: Int[Array, " B"] | None = None  # leading drafts to verify; None for all
    copied: Bool[Array, " B"] | None = None  # whether they were copied from the text
    # The drafter's logits of each position, -inf for tokens that it does not know; None unless
    # `DraftSampler.keeps_logits`. Drafts without any count as certain.
    logits: Float[Array, "B R V"] | None = None


@struct.dataclass
class Verification:
    """A verified block, as a pair's own `acceptance` sees it.

    Place i of `logits`, `chosen` and `keys` follows the first i drafts.
    """

    drafts: Int[Array, "B R"]
    num_drafts: Int[Array, " B"]  # leading drafts that may be accepted
    draft_logits: Float[Array, "B R V"]  # as in `Draft.logits`
    logits: Float[Array, "B T V"]  # the target's, with penalties, biases and masks
    chosen: Int[Array, "B T"]  # the target's own choices by each row's sampling rules
    temperature: Float[Array, " B"]  # 0 is greedy
    keys: Key[Array, "B T"]  # for random numbers of its own, by request seed and position


# Returns the number of accepted drafts [B], and the token [B] that follows them.
Acceptance = Callable[[Verification], tuple[Int[Array, " B"], Int[Array, " B"]]]


@struct.dataclass
class DraftChoice:
    """Chosen drafts, as indices into the last axis of the logits."""

    index: Int[Array, "B *positions"]
    finite: Bool[Array, " B"]


class DraftSampler(Protocol):
    """Chooses drafts by each row's sampling rules, and assembles them into a `Draft`.

    Where a row samples, it draws by the random numbers that the target will draw by.
    """

    @property
    def num_drafts(self) -> int:
        """Number of drafts R of a block."""
        ...

    @property
    def idle(self) -> Bool[Array, " B"]:
        """Rows whose drafts are not verified, whatever they are."""
        ...

    @property
    def keeps_logits(self) -> bool:
        """Whether `draft` keeps the drafter's logits; otherwise it ignores them."""
        ...

    def sample_all(
        self, logits: Float[Array, "B R N"], ids: Int[Array, " N"] | None = None
    ) -> DraftChoice:
        """Choose all positions at once, each as the target would by these logits.

        Args:
          ids: the token of each logit; None if it is the index.
        """
        ...

    def sample_one(
        self, logits: Float[Array, "B N"], at: int, ids: Int[Array, "*rows N"] | None = None
    ) -> DraftChoice:
        """Choose position `at` of the block, from 0, as the target would; `ids` as above."""
        ...

    def draft(
        self,
        tokens: Int[Array, "B R"],
        finite: Bool[Array, " B"],
        *,
        confidence: Float[Array, "B R"] | None = None,
        logits: Float[Array, "B R N"] | None = None,
        ids: Int[Array, "*positions N"] | None = None,
    ) -> Draft:
        """Assemble the chosen tokens into a draft.

        Args:
          confidence: probability that each draft and all before it are accepted.
          logits: from which each position was chosen.
          ids: the token of each logit; None if it is the index.
        """
        ...

    def certain(self, tokens: Int[Array, "B R"], count: Int[Array, " B"] | None = None) -> Draft:
        """Draft given tokens.

        Args:
          count: number of leading drafts to verify; None for all.
        """
        ...


class Drafter(Protocol):
    """Proposes the tokens after each row's anchor, the last decided token.

    Optional members:
      config: its configuration, for reports.
      block: tokens of the block that it advises, anchor included.
      trained_block: the widest block whose last drafts are worth verifying.
      reads: maximum number of tokens past a row's position that it writes into its state.
      predicts_confidence: whether its drafts have probabilities of acceptance, which
        `Plan.confidence_threshold` reads.
      commit(state, num_committed): called with the state that `observe` returned, once it is known
        how many of the observed tokens count. For states that are not positional.
      take(state, row, start, length), put(state, row, start, segment): cut the part of a row that
        belongs to `length` positions, and put it into a row, for the prefix cache. States made of
        `LayerCache`s need neither; other drafters do not know tokens that come from the cache.
      observe(..., num_live): the first tokens of each row that count [B]; the others are padding,
        and what is kept of them may be anything.
      windowed(window): a drafter with the same parameters that sees no more than the last `window`
        positions of a row (`Plan.draft_window`).
      kernels: as of a target.
      loss(logits, labels, probs): the loss [B, R] of each position in training, in place of the
        recipe's. `logits` [B, R, N] are those from which the drafter chose, `labels` the index of
        the target's token among them, `probs` the target's distributions over them where the
        recipe asks for these (`loss=kl`, `loss=mix`), else None.
      describe(): one line for reports.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's hidden states that it reads, numbered as for `Target`; may be empty."""
        ...

    def empty(self, make: CacheMaker) -> Any:
        """Return its state before any token: any pytree of arrays [B, ...], or ().

        It is called without parameters. Only shapes and dtypes count: a new state is zeros. A row
        is not cleared when a request ends; the next one begins by observing tokens at start 0.
        """
        ...

    def observe(
        self,
        state: Any,
        tokens: Int[Array, "B T"],
        taps: Sequence[Float[Array, "B T D"]],
        start: Int[Array, " B"],
    ) -> Any:
        """Return the state after the target ran T tokens at positions start .. start+T-1.

        Not all of the tokens need be kept: those at or past the row's next position are observed
        again, as others. A row with start 0 begins a new text.
        """
        ...

    def propose(
        self,
        state: Any,
        anchor: Int[Array, " B"],
        start: Int[Array, " B"],
        shared: SharedLayers,
        sampler: DraftSampler,
    ) -> tuple[Draft, Any]:
        """Return `sampler.num_drafts` drafts after the anchor, which is at position `start`.

        What it writes into the returned state at `start` and after is not kept.
        """
        ...


# -- modules of Flax NNX ---------------------------------------------------------------------------


def is_nnx(model: Any) -> bool:
    """Return whether a model is a module of Flax NNX, which is imported only if it is used."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def nnx_params(module: Any) -> dict[str, Any]:
    """Return the values of the `nnx.Param` variables of an NNX module, by path."""
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def nnx_constants(module: Any) -> dict[str, Any]:
    """Return the values of its other variables, but for random numbers: constants of programs."""
    from flax import nnx

    _, _, _, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return nnx.to_pure_dict(others)


def with_nnx_params(module: Any, params: Any) -> Any:
    """Return a copy of an NNX module with other values of its `nnx.Param` variables."""
    from flax import nnx

    structure, *parts = nnx.split(module, nnx.Param, ...)
    own, others = jax.tree.map(lambda x: x, parts)  # variables of its own, which it may write to
    nnx.replace_by_pure_dict(own, params)
    return nnx.merge(structure, own, others)


def arrays_of(params: Any) -> Any:
    """Return a tree of parameters with modules, states and variables of NNX as plain arrays."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return params
    kinds = (nnx.Module, nnx.State, nnx.Variable)

    def plain(x: Any) -> Any:
        if isinstance(x, nnx.Module):
            return nnx_params(x)
        if isinstance(x, nnx.State):
            return nnx.to_pure_dict(x)
        return x[...] if isinstance(x, nnx.Variable) else x

    return jax.tree.map(plain, params, is_leaf=lambda x: isinstance(x, kinds))


# -- calls of members, and what is done where optional ones are absent -----------------------------


def with_kernels(model: Any, kernels: str) -> Any:
    """Return a Linen module with a value of its field `kernels`, any other model as it is."""
    if not isinstance(model, nn.Module) or "kernels" not in model.__dataclass_fields__:
        return model
    return model.clone(kernels=kernels)


def takes(model: Any, name: str, member: str = "__call__") -> bool:
    """Return whether a member of a model has an optional argument, such as `num_live`."""
    return name in inspect.signature(getattr(type(model), member)).parameters


@contextlib.contextmanager
def named_errors(model: Any, member: str) -> Iterator[None]:
    """Raise what a member of a module raises as a PlanError that names the member."""
    try:
        yield
    except (DFlashError, jax.errors.JaxRuntimeError):  # the latter are of the device
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        flax = isinstance(model, nn.Module) or is_nnx(model)
        takes = "" if flax else ", parameters first in a plain object"
        raise PlanError(
            f"{type(model).__name__}.{member} fails: {type(error).__name__}: {first}; expected the"
            f" arguments and results that docs/graph.md lists{takes}"
        ) from error


def call(model: Any, params: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
    """Run a method of a Flax module, or of a plain object with its parameters first."""
    name = method or "__call__"
    with named_errors(model, getattr(name, "__name__", name)):
        if isinstance(model, nn.Module):
            return model.apply({"params": params}, *args, method=method, **kwargs)
        if is_nnx(model):
            return getattr(with_nnx_params(model, params), name)(*args, **kwargs)
        return getattr(model, name)(params, *args, **kwargs)


def commit(drafter: Any, state: Any, num_committed: Int[Array, " B"]) -> Any:
    """Return a drafter's state once it is known how many observed tokens count."""
    method = getattr(drafter, "commit", None)
    if method is None:
        return state
    with named_errors(drafter, "commit"):
        return method(state, num_committed)


def take(drafter: Any, state: Any, row: Any, start: Any, length: int) -> Any:
    """Return the part of a drafter's state that belongs to `length` positions of a row."""
    if has_caches(state):
        return take_part(state, row, start, length)
    method = getattr(drafter, "take", None)
    return () if method is None else method(state, row, start, length)


def put(drafter: Any, state: Any, row: Any, start: Any, part: Any) -> Any:
    """Return a drafter's state with what `take` returned in a row."""
    if has_caches(state):
        return put_part(state, row, start, part)
    method = getattr(drafter, "put", None)
    return state if method is None else method(state, row, start, part)
