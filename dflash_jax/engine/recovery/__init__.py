"""The rules that keep agents alive, one concern a file; `engine.controller` applies them.

Pure: standard library, and the equally pure `dflash_jax.tool_parsers` and `dflash_jax.errors`.
"""

from dflash_jax.engine.recovery.cancellation import CancelCell
from dflash_jax.engine.recovery.settings import OFF, Recovery

__all__ = ["OFF", "CancelCell", "Recovery"]
