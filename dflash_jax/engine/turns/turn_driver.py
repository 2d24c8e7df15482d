"""Runs turns in a thread while requests are awaited in event loops."""

import threading
from collections.abc import Callable

from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.running_request import RunningRequest

Notify = Callable[[BaseException | None], None]


class TurnDriver:
    """Runs an engine's turns in a thread while requests are awaited in event loops."""

    def __init__(self, core: EngineCore):
        self.core = core
        self._lock = threading.Lock()
        self._attached: dict[Notify, RunningRequest] = {}

    def attach(self, sequence: RunningRequest, notify: Notify) -> None:
        """Run turns until a request ended.

        Args:
          notify: called in the thread after every turn, with the turn's error if it failed. A
            failed turn detaches all requests.
        """
        with self._lock:
            idle = not self._attached
            self._attached[notify] = sequence
        if idle:  # a daemon, as one turn may compile
            threading.Thread(target=self._run, name="async", daemon=True).start()

    def _run(self) -> None:
        ended = False
        while not ended:
            failure: BaseException | None = None
            try:
                self.core.step()
            except BaseException as error:  # nothing may end this thread silently
                failure = error
            with self._lock:
                attached = list(self._attached.items())
                for notify, sequence in attached:
                    if failure or sequence.done:
                        del self._attached[notify]
                ended = not self._attached
            for notify, sequence in attached:
                try:
                    notify(failure)
                except RuntimeError:  # the event loop is closed
                    self.core.inbox.end(sequence.number, "dropped")
