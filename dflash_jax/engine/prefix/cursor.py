"""How far a prompt has been fed to its row."""

import dataclasses
from concurrent.futures import Future
from typing import Any

from dflash_jax.engine.prefix.cache import Node
from dflash_jax.state import Logprobs


@dataclasses.dataclass(eq=False)
class PromptCursor:
    """Progress of one prompt through prefill. Only the model runner moves it.

    A request that starts over gets a new cursor.

    Attributes:
      use_cache: whether chunks may come from the prefix cache.
      num_fed: tokens of the prompt in the row's caches, restored ones included.
      num_cached: tokens that were restored from the prefix cache.
      node: the prefix-cache node of the last chunk; None where prefixes are not kept.
      added: nodes this request added to the prefix cache, earlier attempts included.
      loading: segments that are being read from disk.
      logprobs: log-probabilities of the chunks, where the request asks for them.
    """

    prompt: tuple[int, ...]
    use_cache: bool = True
    num_fed: int = 0
    num_cached: int = 0
    node: Node | None = None
    added: list[Node] = dataclasses.field(default_factory=list)
    loading: Future[list[Any]] | None = None
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)

    def restarted(self, *, use_cache: bool) -> "PromptCursor":
        """Return a cursor at the beginning of the same prompt."""
        return PromptCursor(
            self.prompt, use_cache=use_cache, added=self.added, loading=self.loading
        )
