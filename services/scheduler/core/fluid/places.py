"""Decides which members add up their sums before others: on their host, then at their site."""

from collections.abc import Collection
from typing import NamedTuple

from services.scheduler.core.fluid.fluid_state import FluidState


class GroupedMembers(NamedTuple):
    addresses: list[str]
    hosts: tuple[int, ...] = ()
    """Members of each host; empty if every member is alone."""
    sites: tuple[int, ...] = ()
    """Hosts of each site; empty if they exchange their sums directly."""

    @property
    def num_sums(self) -> int:
        """Return the number of sums that are exchanged: of sites, hosts or members."""
        return len(self.sites or self.hosts or self.addresses)


def group_members(fluid: FluidState, addresses: Collection[str]) -> GroupedMembers:
    """Group members that share a host's memory, and hosts of a site if there are several sites.
    After a round without a total, members exchange their own sums, which shows who is missing."""
    if fluid.num_failures:
        return GroupedMembers(list(addresses))
    sites: dict[str, dict[str, list[str]]] = {}
    for address in addresses:
        site, host = site_and_host(fluid, address)
        sites.setdefault(site, {}).setdefault(host, []).append(address)
    hosts = [members for site in sites.values() for members in site.values()]
    together = [address for members in hosts for address in members]
    if 1 < len(sites) < len(hosts):
        return GroupedMembers(together, tuple(map(len, hosts)), tuple(map(len, sites.values())))
    if len(hosts) < len(addresses):
        return GroupedMembers(together, tuple(map(len, hosts)))
    return GroupedMembers(list(addresses))


def site_and_host(fluid: FluidState, address: str) -> tuple[str, str]:
    """Return the site and the host of a member; each is its own unless the member reaches it."""
    holds = fluid.holds.get(address)
    host = (holds and holds.host) or address
    return (holds and holds.site and f"site {holds.site}") or host, host
