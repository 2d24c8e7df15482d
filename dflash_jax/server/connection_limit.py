"""The bound on open connections, below the limit of file descriptors."""

import logging
import sys
from pathlib import Path
from typing import Protocol

from uvicorn.server import ServerState

from dflash_jax.server.errors import too_busy
from dflash_jax.server.protocol import Problem

log = logging.getLogger("dflash_jax.server")
MOST_CONNECTIONS = 2048
LEAST_CONNECTIONS = 16
RESERVE = 64  # descriptors for files, processes and connections that are being accepted
ACCEPTED_AT_ONCE = 16  # connections that are accepted before the first of them counts
QUEUED = 1024  # connections that the system queues before they are accepted
GROUPS = ("unused", "idle", "receiving", "unread")  # in the order in which they make room
UNKNOWN_USE = 64  # descriptors in use, where the system does not list them


class BoundedConnection(Protocol):
    """A connection that can be closed in favour of a new one."""

    def evict(self) -> None:
        """Close the connection."""

    def refuse(self, problem: Problem) -> None:
        """Answer with an error object, and close the connection."""


class BoundedConnections(ServerState):
    """The connections of a server. A new one that exceeds the bound replaces the oldest idle one.

    Args:
      most: bound on open connections.

    Attributes:
      unused: connections that sent no request yet, the oldest first.
      idle: those that wait for another request.
      receiving: those in the middle of a request body.
      unread: those whose client does not read the response.
    """

    def __init__(self, most: int = MOST_CONNECTIONS):
        super().__init__()
        self.most = most
        self.unused: dict[BoundedConnection, None] = {}
        self.idle: dict[BoundedConnection, None] = {}
        self.receiving: dict[BoundedConnection, None] = {}
        self.unread: dict[BoundedConnection, None] = {}

    def admit(self, new: BoundedConnection) -> None:
        """Make room for a new connection, or refuse it if every other one is being answered."""
        if len(self.connections) <= self.most:
            return
        log.warning(
            "more than %d connections are open: new ones replace those that are idle", self.most
        )
        for name in GROUPS:
            for oldest in getattr(self, name):
                if oldest is not new:
                    oldest.evict()
                    return
        new.refuse(too_busy())

    def move(self, connection: BoundedConnection, to: str = "") -> None:
        """Put a connection into the group of this name, as its newest one, and out of others."""
        for name in GROUPS:
            group = getattr(self, name)
            group.pop(connection, None)
            if name == to:
                group[connection] = None

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
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    try:
        used = sum(1 for _ in Path(folder).iterdir())
    except OSError:
        used = UNKNOWN_USE
    free = limit - used - RESERVE - ACCEPTED_AT_ONCE
    return min(max(free, LEAST_CONNECTIONS), MOST_CONNECTIONS)
