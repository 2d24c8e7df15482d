"""Checks of Host and Origin headers. Standard library only.

A web page can send requests to any address of the machine that displays it. Two checks refuse them:
the Host header contains the page's own host name if the page makes that name resolve to this
machine (DNS rebinding), and browsers add an Origin header to requests to other sites.
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
    """The Host headers that a server accepts. Ports are not checked: they may be forwarded.

    Attributes:
      names: host names, and addresses as `ipaddress` formats them.
      domains: suffixes such as ".example.com"; every name with one of them is accepted.
      addresses: accept every IP address, which is safe: DNS rebinding needs a name.
      everything: accept every header.
    """

    names: frozenset[str] = frozenset()
    domains: tuple[str, ...] = ()
    addresses: bool = False
    everything: bool = False

    def accepts(self, header: str) -> bool:
        """Return whether to accept a Host header; loopback addresses and `localhost` always are."""
        if self.everything:
            return True
        name = host_name(header)
        if name is None:
            return False
        address = _address(name)
        if address is not None:
            return self.addresses or address.is_loopback or str(address) in self.names
        return name == "localhost" or name in self.names or name.endswith(self.domains)


def allowed_hosts(
    bound: Iterable[str], wanted: Sequence[str] = (), *, has_keys: bool = False
) -> AllowedHosts:
    """Return the Host headers to accept.

    Args:
      bound: the value of `--host`, and the addresses it resolves to. If one of them means all
        interfaces, every address and the machine's own name are accepted.
      wanted: values of `--allowed-host`.
      has_keys: requests need an API key, which web pages do not have. Then every host is accepted
        unless `wanted` restricts them.

    Raises:
      RequestError: an entry of `wanted` is not a host.
    """
    wanted = [allowed_host(text) for text in wanted]
    if ANY in wanted or (has_keys and not wanted):
        return AllowedHosts(everything=True)
    bound = [name.lower() for name in bound]
    all_interfaces = any(map(_means_all_interfaces, bound))
    names = set(bound)
    domains = []
    for name in wanted:
        if name.startswith("*."):
            domains.append(name.removeprefix("*"))
        else:
            names.add(name)
    if all_interfaces:
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        names |= {own, short, f"{short}.local"}
    plain = frozenset(str(_address(name) or name) for name in names if name)
    return AllowedHosts(plain, tuple(domains), addresses=all_interfaces)


def _means_all_interfaces(bound: str) -> bool:
    address = _address(bound)
    return not bound or (address is not None and address.is_unspecified)


def host_name(header: str) -> str | None:
    """Return the host of a Host header, in lower case, without port, brackets and trailing dot.

    None if the header is malformed, for example if it contains a path, a comma or user information.
    """
    match = HOST.fullmatch(header.strip().lower())
    if match is None:
        return None
    name = match["name"]
    if name.startswith("["):
        return name[1:-1] if _address(name[1:-1]) else None
    return name.removesuffix(".") or None


def _address(name: str) -> Address | None:
    """Parse an IP address, ignoring the zone; an IPv4-mapped address becomes IPv4."""
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def allowed_host(text: str) -> str:
    """Return a normalized value of `--allowed-host`.

    Raises:
      RequestError: the value is not a host name, an address, `*` or `*.NAME`.
    """
    plain = text.strip().lower().removesuffix(".")
    if plain == ANY:
        return plain
    address = _address(plain.removeprefix("[").removesuffix("]"))
    if address is not None:
        return str(address)
    if NAME.fullmatch(plain.removeprefix("*.")):
        return plain
    raise RequestError(
        f"--allowed-host is {text!r}; expected a host name or an address without scheme and port,"
        " *.NAME for all names below one, or * for any"
    )


def cors_origin(text: str) -> str:
    """Return a value of `--cors-origin` in the form of Origin headers.

    Raises:
      RequestError: the value is neither `*` nor an origin.
    """
    plain = text.strip().lower()
    if plain == ANY:
        return plain
    match = ORIGIN.fullmatch(plain)
    if match is None:
        raise RequestError(
            f"--cors-origin is {text!r}; expected an origin such as https://page.example or"
            " http://localhost:3000, without path and final slash, or * for any"
        )
    return plain.removesuffix(DEFAULT_PORTS.get(match["scheme"], "/"))


def is_own_page(origin: str, host: str) -> bool:
    """Return whether a request's origin is the host that it is sent to."""
    host = host.strip().lower()
    return host != "" and origin.lower().partition("://")[2] == host


def is_json(content_types: Sequence[str]) -> bool:
    """Return whether all Content-Type headers are JSON, which browsers send after a preflight."""
    kinds = [value.partition(";")[0].strip().lower() for value in content_types]
    return bool(kinds) and all(
        re.fullmatch(r"application/([a-z0-9!#$&^_.-]+\+)?json", kind) for kind in kinds
    )
