"""The sockets that a server listens on. Standard library only."""

import errno
import os
import socket

from dflash_jax.errors import RequestError

ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a resolved address family that is disabled


def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets of all addresses that a host name has.

    Raises:
      RequestError: one cannot be bound.
    """
    sockets: list[socket.socket] = []
    failures: list[Exception] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        addresses = []
        failures.append(error)
    for family, _, _, _, address in dict.fromkeys(addresses):
        at = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
        try:
            sockets.append(socket.create_server(at, family=family))
        except OSError as error:
            failures.append(error)
    if sockets and all(getattr(error, "errno", 0) in ABSENT for error in failures):
        return sockets
    for bound in sockets:
        bound.close()
    error = failures[-1]
    number = getattr(error, "errno", 0) or 0  # negative for errors of name resolution
    why = os.strerror(number) if number > 0 else error
    raise RequestError(
        f"cannot listen on {host}, port {port}: {why}; give an address of this machine as --host,"
        " and a free port (--port 0 takes one)"
    ) from error
