"""Decides which members add up their sums before others: on their host, then at their site."""

from typing import NamedTuple

from services.scheduler.core.fluid.fluid_state import FluidState


class GroupedMembers(NamedTuple):
    addresses: list[str]
    hosts: tuple[int, ...] = ()
    """Members of each host; empty if every member is alone."""
    sites: tuple[int, ...] = ()
    """Hosts of each site; empty if they exchange their sums directly."""


def group_members(fluid: FluidState, addresses: list[str]) -> GroupedMembers:
    """Group members that share a host's memory, and hosts that reach each other in their site, if
    there are several sites. After a round that came to nothing every member exchanges its own sum:
    only then is it known which one is missed."""
    if fluid.num_failures:
        return GroupedMembers(addresses)
    sites: dict[str, dict[str, list[str]]] = {}
    for address in addresses:
        holds = fluid.holds.get(address)
        host = (holds and holds.host) or address
        site = (holds and holds.site and f"site {holds.site}") or host
        sites.setdefault(site, {}).setdefault(host, []).append(address)
    hosts = [members for site in sites.values() for members in site.values()]
    together = [address for members in hosts for address in members]
    if 1 < len(sites) < len(hosts):
        return GroupedMembers(together, tuple(map(len, hosts)), tuple(map(len, sites.values())))
    if len(hosts) < len(addresses):
        return GroupedMembers(together, tuple(map(len, hosts)))
    return GroupedMembers(addresses)
