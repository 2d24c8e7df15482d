"""The state machine of a request, and the rules that keep agents from stalling or looping.

`controller` is the machine, and `request_state` its states, events and effects. The other modules
are rules, one concern each. Only the standard library, `tool_parsers` and `errors` are imported.
"""

from dflash_jax.engine.state_machine.settings import OFF, Recovery

__all__ = ["OFF", "Recovery"]
