"""Hosts that a recipe may make this process contact: the internet, and hosts that the local
environment allows by name.

    DIGENRL_PRIVATE_HOSTS=judge,10.0.0.0/8     names as recipes write them, addresses, networks

A recipe may come from elsewhere. It must not make a worker contact private addresses: the machine
itself, its neighbours, or a cloud's metadata, which gives credentials to every caller. So a name is
looked up once per request, every address that it has is checked, and the request goes to the
address that was checked; redirects are not followed.
"""

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from shared.errors import ScoringError, UserError
from shared.proxies import find_proxy, through

SETTING = "DIGENRL_PRIVATE_HOSTS"
METADATA = frozenset(
    ipaddress.ip_address(address)
    for address in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254",
                    "192.0.0.192", "168.63.129.16")
)  # fmt: skip
"""Addresses at which clouds serve a machine's secrets; some of them look public."""
MACHINE_ADDRESS = "an address of a machine's metadata or of its own link"
"""Addresses that no name allows: only the address itself, or its network."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class PrivateHosts:
    """Hosts that are allowed although they are not of the internet."""

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    def check(self, host: str, addresses: Collection[str]) -> None:
        """Raises UserError if a recipe may not have ``host`` asked at one of these addresses."""
        is_named = host.lower().rstrip(".") in self.names
        for given in addresses:
            address = ipaddress.ip_address(given.partition("%")[0])
            kind = private_kind(address)
            if is_named and kind != MACHINE_ADDRESS:
                continue
            if kind is not None and not any(address in each for each in self.networks):
                at = host if host == given else f"{host}, which is {given},"
                raise UserError(
                    f"url: {at} is {kind}, which no recipe may have asked; if it is meant, set "
                    f"{SETTING}={host} where the worker runs"
                )


def private_hosts(given: str | None = None) -> PrivateHosts:
    """Return the hosts of the setting, by default from the environment."""
    words = (os.environ.get(SETTING, "") if given is None else given).replace(",", " ").split()
    names, networks = set[str](), list[Network]()
    for word in words:
        try:
            networks.append(ipaddress.ip_network(word.strip("[]"), strict=False))
        except ValueError:
            names.add(word.lower().rstrip("."))
    return PrivateHosts(frozenset(names), tuple(networks))


def named_in(urls: Iterable[str | None]) -> str:
    """Return the setting that allows the hosts of these URLs, in addition to the environment's: for
    a user who starts a recipe on this machine himself."""
    hosts = {_parsed(url).host for url in urls if url is not None}
    meant = [
        host
        for host in sorted(hosts)
        if all(
            private_kind(ipaddress.ip_address(each)) != MACHINE_ADDRESS for each in _literal(host)
        )
    ]
    return ",".join([*os.environ.get(SETTING, "").replace(",", " ").split(), *meant])


def allow(urls: Iterable[str | None]) -> None:
    """Allow the hosts of these URLs in this process, for who has chosen them himself."""
    os.environ[SETTING] = named_in(urls)


def private_kind(address: Address) -> str | None:
    """Return what makes an address one that only this network reaches; None if it is public."""
    address = _inner(address)
    if address in METADATA or address.is_link_local:
        return MACHINE_ADDRESS
    if address.is_loopback or address.is_unspecified:
        return "this machine itself"
    is_old = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    if is_old or not address.is_global or address.is_multicast or address.is_reserved:
        return "an address of a private network"
    return None


def _inner(address: Address) -> Address:
    """Return the IPv4 address that another one carries: translated, tunnelled or mapped."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in NAT64 or (int(address) < 1 << 32 and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def resolve_addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which they are tried; raises OSError."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in addresses))


def check_url(url: str) -> None:
    """Look at a URL before anything is sent; a name that is not known yet is looked at later.

    Raises:
        UserError: if no recipe may have it asked.
    """
    parsed = _parsed(url)
    if find_proxy(url) is None:
        try:
            addresses = resolve_addresses(parsed.host, _port(parsed))
        except OSError:
            return
        private_hosts().check(parsed.host, addresses)
    else:
        private_hosts().check(parsed.host, _literal(parsed.host))


class CheckedTransport(httpx.BaseTransport):
    """Sends requests where a recipe may have them sent, to the very address that was looked at."""

    def __init__(self, url: str, limits: httpx.Limits | None = None) -> None:
        """``url``: where requests will go; a proxy that this machine has for it is used."""
        self._proxy = find_proxy(url)
        more: dict[str, Any] = {} if limits is None else {"limits": limits}
        try:
            self._inner = httpx.HTTPTransport(proxy=self._proxy, **more)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"url: {url} cannot be asked{through(url)}: {error}; name its host in NO_PROXY"
            ) from error
        self._private = private_hosts()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request.

        Raises:
            ScoringError: if no recipe may have it sent there.
            httpx.TransportError: if there is no answer.
        """
        host = request.url.host
        if self._proxy is not None:  # it looks names up itself
            self._checked(host, _literal(host))
            return self._inner.handle_request(request)
        try:
            addresses = resolve_addresses(host, _port(request.url))
        except OSError as error:
            raise httpx.ConnectError(f"{host}: {error}", request=request) from error
        self._checked(host, addresses)
        request.extensions = {**request.extensions, "sni_hostname": host}
        request.url = request.url.copy_with(host=addresses[0].partition("%")[0])
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()

    def _checked(self, host: str, addresses: Collection[str]) -> None:
        try:
            self._private.check(host, addresses)
        except UserError as error:
            raise ScoringError(str(error)) from error


def _parsed(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"url: {url!r} is no address of a server: {error}; correct it") from error


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _literal(host: str) -> list[str]:
    """Return the address that a host is written as, if it is one in any of its spellings."""
    try:
        ipaddress.ip_address(host)
        return [host]
    except ValueError:
        pass
    try:
        return [socket.inet_ntoa(socket.inet_aton(host))]
    except OSError:
        return []
