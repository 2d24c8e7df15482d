"""How far a prompt has been fed to its row."""

import dataclasses
from concurrent.futures import Future
from typing import Any

from dflash_jax.engine.prefix.cache import Node
from dflash_jax.graph.state import Logprobs


@dataclasses.dataclass(eq=False)
class PromptCursor:
    """Progress of one prompt through prefill. Only the model runner moves it.

    A request that starts over gets a new cursor.
    """

    prompt: tuple[int, ...]
    use_cache: bool = True  # whether chunks may come from the prefix cache
    num_fed: int = 0  # tokens of the prompt in the row's caches, restored ones included
    num_cached: int = 0  # tokens that were restored from the prefix cache
    node: Node | None = None  # of the last chunk; None where prefixes are not kept
    # Nodes this request added to the prefix cache, earlier attempts included.
    added: list[Node] = dataclasses.field(default_factory=list)
    loading: Future[list[Any]] | None = None  # segments that are being read from disk
    # Log-probabilities of the chunks, where the request asks for them.
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)

    def restarted(self, *, use_cache: bool) -> "PromptCursor":
        """Return a cursor at the beginning of the same prompt."""
        known = {"added": self.added, "loading": self.loading}
        return PromptCursor(self.prompt, use_cache=use_cache, **known)
