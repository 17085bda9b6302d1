"""Keeps loopback and the hosts of a run off the proxies that this machine names.

Libraries read HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case. Our own clients of a
run's hosts ignore proxies (`trust_env=False`): httpx fails on a proxy with an unknown scheme, even
if that proxy would not be used.
"""

import ipaddress
import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shared.telemetry import public

LOOPBACK = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1")


def proxies() -> dict[str, str]:
    """Return the proxies that this machine names, for `http`, `https` and `all`."""
    named = getproxies()
    return {kind: named[kind] for kind in ("http", "https", "all") if kind in named}


def go_direct(*urls: str | None) -> None:
    """Have all libraries of this process and of its children ask loopback, and the hosts of these
    URLs, without a proxy."""
    given = f"{os.environ.get('NO_PROXY', '')},{os.environ.get('no_proxy', '')}".split(",")
    exceptions = [each.strip() for each in given if each.strip()]
    if proxies() and "*" not in exceptions:
        hosts = [urlsplit(url).hostname or "" for url in urls if url]
        merged = ",".join(filter(None, dict.fromkeys([*exceptions, *LOOPBACK, *hosts])))
        os.environ |= {"NO_PROXY": merged, "no_proxy": merged}


def find_proxy(url: str) -> str | None:
    """Return the proxy for a URL; None: no proxy."""
    parts, named = urlsplit(url), proxies()
    host = parts.hostname or ""
    if _is_loopback(host) or proxy_bypass(host):
        return None
    return named.get(parts.scheme) or named.get("all")


def through(url: str) -> str:
    """Return the proxy of a URL as words for an error; empty without one."""
    proxy = find_proxy(url)
    return "" if proxy is None else f" through the proxy {public(proxy)}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
