"""The open connections of a server, a bound on their number, and which of them make room."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from uvicorn.server import ServerState

from dflash_jax.server.errors import too_busy

if TYPE_CHECKING:
    from dflash_jax.server.http_connection import Connection

log = logging.getLogger("dflash_jax.server")
Group = Literal["unused", "idle", "receiving", "unread"]
MOST_CONNECTIONS = 2048
LEAST_CONNECTIONS = 16
RESERVE = 64  # descriptors that connections leave to files and processes
ACCEPTED_AT_ONCE = 16  # connections that are accepted before the first of them counts
QUEUED = 1024  # connections that the system queues before they are accepted
UNKNOWN_USE = 64  # descriptors that count as used where the system does not list them


class BoundedConnections(ServerState):
    """The connections of a server. A new one that exceeds the bound replaces the oldest idle one.

    Connections that are being answered are in no group, and make no room.

    Args:
      most: bound on open connections.

    Attributes:
      unused: connections that sent no request yet, the oldest first.
      idle: connections that wait for another request.
      receiving: connections in the middle of a request body.
      unread: connections whose client does not read the response.
    """

    def __init__(self, most: int = MOST_CONNECTIONS):
        super().__init__()
        self.most = most
        self.unused: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        self.receiving: dict[Connection, None] = {}
        self.unread: dict[Connection, None] = {}
        # In the order in which groups make room.
        self._groups: dict[Group, dict[Connection, None]] = {
            "unused": self.unused,
            "idle": self.idle,
            "receiving": self.receiving,
            "unread": self.unread,
        }

    def admit(self, new: "Connection") -> None:
        """Make room for a new connection, or refuse it if every other one is being answered."""
        if len(self.connections) <= self.most:
            return
        log.warning(
            "more than %d connections are open: new ones replace those that are idle", self.most
        )
        for group in self._groups.values():
            for oldest in group:
                if oldest is not new:
                    oldest.evict()
                    return
        new.refuse(too_busy(), logged=False)  # a flood of them has the warnings above

    def move(self, connection: "Connection", to: Group | None = None) -> None:
        """Make a connection the newest one of a group, or remove it from all groups."""
        for group in self._groups.values():
            group.pop(connection, None)
        if to is not None:
            self._groups[to][connection] = None

    def evict_unread(self) -> None:
        """Close the connections of clients that do not read their responses."""
        for connection in list(self.unread):
            connection.evict()


def most_connections() -> int:
    """Return how many connections may be open with the process's limit of file descriptors."""
    try:
        import resource
    except ImportError:  # not on Windows
        return MOST_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    free = limit - _used_descriptors() - RESERVE - ACCEPTED_AT_ONCE
    return min(max(free, LEAST_CONNECTIONS), MOST_CONNECTIONS)


def _used_descriptors() -> int:
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    try:
        return sum(1 for _ in Path(folder).iterdir())
    except OSError:
        return UNKNOWN_USE
