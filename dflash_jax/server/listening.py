"""The sockets that a server listens on. Standard library only."""

import errno
import os
import socket

from dflash_jax.errors import RequestError

# Errors of a resolved address whose family is disabled.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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
        number, *scope = address[1:]
        if sockets:  # all have the port that the first one got
            number = sockets[0].getsockname()[1]
        try:
            sockets.append(socket.create_server((address[0], number, *scope), family=family))
        except OSError as error:
            failures.append(error)
    if sockets and all(getattr(error, "errno", 0) in ABSENT for error in failures):
        return sockets
    for bound in sockets:
        bound.close()
    error = failures[-1]
    code = getattr(error, "errno", 0) or 0  # negative for errors of name resolution
    why = os.strerror(code) if code > 0 else error
    raise RequestError(
        f"cannot listen on {host}, port {port}: {why}; give an address of this machine as --host,"
        " and a free port (--port 0 takes one)"
    ) from error
