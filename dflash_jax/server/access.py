"""Which hosts a server answers for, and which web pages may use it. Standard library only.

A web page may send requests to any address of the machine it is shown on. Two checks keep it out:
the Host header, which names the page's own site if the page has that name resolve to this machine
(DNS rebinding), and the Origin header, which browsers add to what pages send to other sites.
"""

import dataclasses
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from dflash_jax.errors import RequestError

ANY = "*"
NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+(%[a-z0-9_.-]+)?\]|[a-z0-9_][a-z0-9_.-]*)(:[0-9]{0,5})?")
ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://[^\s/?#@,]+")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclasses.dataclass(frozen=True)
class AllowedHosts:
    """The Host headers that a server accepts. Ports never matter: they may be forwarded.

    Attributes:
      names: names, and addresses as `ipaddress` writes them.
      domains: any name below one of these is accepted.
      addresses: any address is accepted. No name can be made to resolve to an address as a name.
      everything: nothing is checked.
    """

    names: frozenset[str] = frozenset()
    domains: tuple[str, ...] = ()
    addresses: bool = False
    everything: bool = False

    def accepts(self, header: str) -> bool:
        """Whether a Host header names this server; loopback addresses and `localhost` always do."""
        if self.everything:
            return True
        name = host_name(header)
        if name is None:
            return False
        if address := _address(name):
            return self.addresses or address.is_loopback or str(address) in self.names
        return name == "localhost" or name in self.names or name.endswith(self.domains)


def allowed_hosts(
    bound: Iterable[str], given: Sequence[str] = (), *, has_keys: bool = False
) -> AllowedHosts:
    """Return the Host headers to accept.

    Args:
      bound: the name given as `--host`, and the addresses it was found to have. If one of them
        stands for all interfaces, any address and the machine's own name are accepted.
      given: as `--allowed-host` has them.
      has_keys: requests need a key, which no page has. Without `given`, any host is accepted.

    Raises:
      RequestError: an entry of `given` is no host.
    """
    given = [allowed_host(text) for text in given]
    if ANY in given or (has_keys and not given):
        return AllowedHosts(everything=True)
    bound = [name.lower() for name in bound]
    wild = any(not name or ((found := _address(name)) and found.is_unspecified) for name in bound)
    names = {*bound, *(name for name in given if not name.startswith("*."))}
    if wild:
        own = socket.gethostname().lower()
        first = own.partition(".")[0]
        names |= {own, first, f"{first}.local"}
    plain = {str(_address(name) or name) for name in names if name}
    domains = tuple(name[1:] for name in given if name.startswith("*."))
    return AllowedHosts(frozenset(plain), domains, addresses=wild)


def host_name(header: str) -> str | None:
    """The name or address in a Host header, in lower case, without port, brackets and final dot.

    None if the header is malformed: user information, a path or a comma in it, for example.
    """
    found = HOST.fullmatch(header.strip().lower())
    if found is None:
        return None
    name = found["name"]
    if name.startswith("["):
        return name[1:-1] if _address(name[1:-1]) else None
    return name.removesuffix(".") or None


def _address(name: str) -> Address | None:
    """The address that a text is, without zone; an IPv4 one if it is written as IPv6."""
    try:
        found = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def allowed_host(text: str) -> str:
    """Return a value of `--allowed-host` as `allowed_hosts` takes it.

    Raises:
      RequestError: it is no name, no address, not `*` and not `*.` with a name.
    """
    plain = text.strip().lower().removesuffix(".")
    inner = plain.removeprefix("[").removesuffix("]")
    if plain == ANY:
        return plain
    if found := _address(inner):
        return str(found)
    if NAME.fullmatch(plain.removeprefix("*.")):
        return plain
    raise RequestError(
        f"--allowed-host is {text!r}; expected a host name or an address without scheme and port,"
        " *.NAME for all names below one, or * for any"
    )


def cors_origin(text: str) -> str:
    """Return a value of `--cors-origin` as browsers write it in an Origin header.

    Raises:
      RequestError: it is not `*`, nor an origin.
    """
    plain = text.strip().lower()
    if plain == ANY:
        return plain
    found = ORIGIN.fullmatch(plain)
    if found is None:
        raise RequestError(
            f"--cors-origin is {text!r}; expected an origin such as https://page.example or"
            " http://localhost:3000, without path and final slash, or * for any"
        )
    return plain.removesuffix(DEFAULT_PORTS.get(found["scheme"], "/"))


def is_own_page(origin: str, host: str) -> bool:
    """Whether a page of this origin was loaded from the host that it sends a request to."""
    return origin.lower().partition("://")[2] == host.strip().lower() != ""


def is_json(content_types: Sequence[str]) -> bool:
    """Whether Content-Type headers declare JSON, which no page sends without asking first."""
    kinds = [value.partition(";")[0].strip().lower() for value in content_types]
    return bool(kinds) and all(
        re.fullmatch(r"application/([a-z0-9!#$&^_.-]+\+)?json", kind) for kind in kinds
    )
