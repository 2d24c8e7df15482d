"""Addresses of the form HOST:PORT, at which processes meet."""

import socket

LOOPBACK = "127.0.0.1"


def joined_address(name: str, port: int) -> str:
    """Return HOST:PORT; names that are IPv6 addresses are put in brackets."""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT.

    Raises:
      ValueError: the text is no such address.
    """
    name, _, port = text.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"{text!r}; expected HOST:PORT, the address of process 0, with a port from 1 to 65535"
        )
    return name.strip("[]"), int(port)


def free_address(name: str = LOOPBACK) -> str:
    """Return HOST:PORT with a port of this machine that is free now."""
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    with socket.create_server((name, 0), family=family) as server:
        return joined_address(name, server.getsockname()[1])
