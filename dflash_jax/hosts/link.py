"""The front's end of the connection to one worker."""

import queue
import threading
from collections.abc import Callable

from dflash_jax.hosts import messages
from dflash_jax.hosts.channel import Channel


class WorkerLink:
    """The front's connection to one worker, with a thread that sends and one that receives.

    Args:
      received: called with every reply but pongs, in the receiving thread.
      lost: called with the reason when the connection breaks.
    """

    def __init__(
        self,
        index: int,
        channel: Channel,
        received: Callable[[int, messages.Reply], None],
        lost: Callable[[int, str], None],
    ):
        self.index, self.missed = index, 0
        self._channel, self._received, self._lost = channel, received, lost
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for target in (self._send_all, self._receive_all):
            threading.Thread(target=target, name=f"host {index}", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send a message; returns at once."""
        self._outbox.put(data)

    def close(self) -> None:
        """Close the connection."""
        self._outbox.put(None)
        self._channel.close()

    def _send_all(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._channel.send(data)
        except OSError as error:
            self._lost(self.index, f"the connection ended: {error}")

    def _receive_all(self) -> None:
        try:
            while True:
                reply = messages.decode_reply(self._channel.receive())
                if isinstance(reply, messages.Pong):
                    self.missed = 0
                else:
                    self._received(self.index, reply)
        except (OSError, EOFError, ValueError) as error:  # of which msgspec's are ValueErrors
            self._lost(self.index, f"the connection ended: {error}")
