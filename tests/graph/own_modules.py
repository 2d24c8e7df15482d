"""A target and drafters of a user, who has the package and no checkout; decoded losslessly.

Run as a program, it decodes the target with each drafter, and ends with 0 if no token differs.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflash_jax as dj
from dflash_jax.graph import Graph, GraphPrograms, LayerCache, ModelConfig, TargetOutput

VOCAB, WIDTH, LONGEST = 61, 24, 96
PLAN = dj.Plan(rows=2, block=4, chunk=8, max_length=LONGEST, dtype="float32", steps_per_call=1)
PROMPTS = [[5, 9, 5, 9, 5], [7, 3, 11, 2, 40, 8, 1, 7, 3, 11, 2]]


# -- modules of a user -----------------------------------------------------------------------------


def write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Return buffer [B, K, S, H] with new [B, K, T, H] in slots start .. start+T-1 of each row."""
    put = jax.lax.dynamic_update_slice
    return jax.vmap(lambda row, part, at: put(row, part, (0, at, 0)))(buffer, new, start)


class Own(nn.Module):
    """A decoder of one layer with attention of its own; `fault` breaks an obligation."""

    config: Any = ModelConfig(VOCAB, WIDTH, 1, eos_token_ids=(0,))
    heads: int = 2
    fault: str = ""

    def setup(self) -> None:
        normal = nn.initializers.normal(0.3)
        self.table = self.param("table", normal, (VOCAB, WIDTH))
        self.places = self.param("places", normal, (2 * LONGEST, WIDTH))
        self.qkv = self.param("qkv", normal, (WIDTH, 3, self.heads, WIDTH // self.heads))
        self.mlp = [self.param(n, normal, (WIDTH, WIDTH)) for n in ("up", "down")]

    def empty_caches(self, make: Any) -> tuple[LayerCache, ...]:
        return (make(self.heads, WIDTH // self.heads, None),)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.table[tokens]

    def logits(self, hidden: jax.Array) -> jax.Array:
        return (hidden @ self.table.T).astype(jnp.float32)

    def __call__(
        self,
        tokens: jax.Array,
        caches: Any,
        start: jax.Array,
        *,
        taps: tuple[int, ...] = (),
        taps_at: str = "late",
        chunked: bool = False,
    ) -> TargetOutput:
        [cache] = caches
        at = start[:, None] + jnp.arange(tokens.shape[1])[None]
        x = states = self.embed(tokens) + self.places[at]
        q, k, v = jnp.einsum("btd,dchw->cbhtw", x, self.qkv)
        cache = LayerCache(write(cache.k, k, start), write(cache.v, v, start))
        limit = {"later tokens": at + 1, "slots": at * 0 + LONGEST}.get(self.fault, at)
        seen = jnp.arange(cache.slots)[None, None, None] <= limit[:, None, :, None]
        scores = jnp.where(seen, jnp.einsum("bhtw,bhsw->bhts", q, cache.k), -jnp.inf)
        heads = jnp.einsum("bhts,bhsw->bthw", jax.nn.softmax(scores, axis=-1), cache.v)
        if self.fault == "rows":
            heads = heads + heads.mean(axis=0, keepdims=True)
        x = x + heads.reshape(x.shape)
        x = x + jnp.tanh(x @ self.mlp[0]) @ self.mlp[1]
        return TargetOutput(x, tuple((states, x)[i] for i in taps), (cache,))


class Bigram:
    """Drafts the token that followed the last time, for each token of the row's own text."""

    taps = ()

    def empty(self, make: Any) -> Any:
        return jnp.zeros((make.rows, VOCAB), jnp.int32), jnp.zeros(make.rows, jnp.int32)

    def observe(self, params: Any, state: Any, tokens: Any, taps: Any, start: Any) -> Any:
        return (*state[:2], tokens)

    def commit(self, state: Any, num_committed: Any) -> Any:
        follower, last, tokens = state
        before = jnp.concatenate([last[:, None], tokens], axis=1)
        kept = jnp.arange(tokens.shape[1])[None] < num_committed[:, None]
        index = jnp.where(kept, before[:, :-1], VOCAB)  # out of the table: dropped
        follower = follower.at[jnp.arange(len(last))[:, None], index].set(tokens, mode="drop")
        return follower, jnp.take_along_axis(before, num_committed[:, None], axis=1)[:, 0]

    def propose(
        self, params: Any, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any
    ) -> Any:
        drafts = [anchor]
        for _ in range(sampler.num_drafts):
            drafts.append(jnp.take_along_axis(state[0], drafts[-1][:, None], axis=1)[:, 0])
        return sampler.certain(jnp.stack(drafts[1:], axis=1)), state


class Heads(nn.Module):
    """Each place has a head over the target's last hidden state and the anchor."""

    width: int
    depth: int
    places: int

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.depth,)

    def setup(self) -> None:
        shape = (self.places, 2 * self.width, self.width)
        self.w = self.param("w", nn.initializers.normal(0.02), shape)

    def empty(self, make: Any) -> Any:
        return jnp.zeros((make.rows, self.width), make.dtype)

    def observe(self, state: Any, tokens: Any, taps: Any, start: Any) -> Any:
        return state, taps[0]

    def commit(self, state: Any, num_committed: Any) -> Any:
        old, hidden = state
        at = jnp.maximum(num_committed - 1, 0)[:, None, None]
        last = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
        return jnp.where(num_committed[:, None] > 0, last, old)

    def logits(self, hidden: Any, anchor: Any, shared: Any) -> Any:
        x = jnp.concatenate([hidden, shared.embed(anchor)], axis=-1)
        made = hidden[:, None] + jax.nn.silu(jnp.einsum("bd,rdw->brw", x, self.w))
        return shared.head(made)

    def propose(self, state: Any, anchor: Any, start: Any, shared: Any, sampler: Any) -> Any:
        choice = sampler.sample_all(self.logits(state, anchor, shared)[:, : sampler.num_drafts])
        return sampler.draft(choice.index, choice.finite), state


def decoded(
    programs: GraphPrograms, params: Any, step: str, **rules: Any
) -> tuple[list[list[int]], int]:
    """Return the texts of `PROMPTS`, and the number of calls of a step that made them."""
    graph = programs.graph
    state, chosen, calls = graph.init_state(), graph.rules(**rules), 0
    texts: list[list[int]] = [[] for _ in PROMPTS]
    out: Any = None
    for row, prompt in enumerate(PROMPTS):
        state, out = programs.prefill(params, state, prompt, row=row, rules=chosen)
        texts[row] += out.tokens[row]
    while not out.done.all():
        state, out = getattr(programs, step)(params, state, rules=chosen)
        texts = [text + new for text, new in zip(texts, out.tokens, strict=True)]
        calls += 1
    return texts, calls


def trained(graph: Graph, params: Any, texts: list[list[int]], steps: int = 60) -> Any:
    """Return parameters after some steps of training `Heads` on the target's own texts."""
    drafter, places = graph.pair.drafter, graph.plan.block - 1
    shared = graph.pair.shared(params)
    found = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = np.array([prompt + text], np.int32)
        one = Graph(dj.Pair(graph.pair.target), graph.plan)
        caches = jax.tree.map(lambda x: x[:1], one.init_state().target)
        start = jnp.zeros(1, jnp.int32)
        out = one.pair.target_call(params, tokens, caches, start, taps=drafter.taps)
        ends = np.arange(tokens.shape[1] - places - 1)
        follow = tokens[0][ends[:, None] + 1 + np.arange(places + 1)]
        found.append((out.taps[0][0][ends], follow[:, 0], follow[:, 1:]))
    hidden, anchor, labels = (jnp.concatenate(x) for x in zip(*found, strict=True))

    def loss(own: Any) -> Any:
        args = (hidden, anchor, shared)
        logits = drafter.apply({"params": own}, *args, method="logits")
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    rule = optax.adam(0.02)

    @jax.jit
    def step(own: Any, moments: Any) -> Any:
        change, moments = rule.update(jax.grad(loss)(own), moments)
        return optax.apply_updates(own, change), moments

    own, moments = params["drafter"], rule.init(params["drafter"])
    with jax.numpy_dtype_promotion("standard"):  # as optax needs
        for _ in range(steps):
            own, moments = step(own, moments)
    return params | {"drafter": own}


def main() -> None:
    """Decode without a drafter, with drafts from the text, and with fresh and trained heads."""
    plain = Graph(dj.Pair(Own()), PLAN)
    params = plain.init_params(jax.random.key(1))
    expected, steps = decoded(plain.compile(["prefill", "plain"]), params, "plain", stop=())
    graph = Graph(dj.Pair(Own(), Heads(WIDTH, depth=1, places=3)), PLAN)
    fresh = graph.init_params(jax.random.key(2)) | params
    for drafter, given in (
        (Bigram(), params),
        (graph.pair.drafter, fresh),
        (graph.pair.drafter, trained(graph, fresh, expected)),
    ):
        programs = Graph(dj.Pair(Own(), drafter), PLAN).compile(["prefill", "speculative"])
        texts, calls = decoded(programs, given, "speculative", stop=())
        assert texts == expected
        assert calls <= steps
        assert "stablehlo" in programs.graph.lower("speculative").as_text()
        print(type(drafter).__name__, calls, "of", steps, "calls")


if __name__ == "__main__":
    main()
