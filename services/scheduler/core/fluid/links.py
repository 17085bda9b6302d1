"""Decides by the measured rates of members' lines how long a round may take, and who commits."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from services.scheduler import limits
from services.scheduler.core.fluid.fluid_state import ExchangeRound, FluidState
from services.scheduler.core.fluid.places import GroupedMembers
from services.scheduler.core.state import Plan, State
from shared.messages.fluid import Share

VERSION_PARTS = 4
"""A version's weights, moments and average, each of as many bytes as a sum."""
MIN_SLOW_S, SLOW_LINE = 2.0, 2.0
"""Seconds of a sum and its total, and factor over the fastest line's, from which a line is slow."""
MARGIN = 2.0
"""Times what a round takes by the measured rates before it is given up: rates change."""


class Line(NamedTuple):
    """Seconds of a sum on the way up, and of a total on the way down."""

    up: float
    down: float


def bytes_to_exchange(plan: Plan, fluid: FluidState, shares: Sequence[Share]) -> int:
    """Return the bytes that a member exchanges: its sum, or one of each group (deterministic)."""
    size = fluid.sum_bytes
    if not plan.schedule.deterministic:
        return size
    return size * max(len({piece.group for piece in share.pieces}) for share in shares)


def choose_committer(state: State, fluid: FluidState, shares: Sequence[Share]) -> str:
    """Return the member from which the version leaves soonest, in whole seconds; then a measured
    one, then the one with most pieces. Committers that were too slow before come last."""

    def rank(share: Share) -> tuple[bool, float, bool, int, str]:
        leaves = seconds_to_leave(state, fluid, share.worker) // 1
        is_measured = state.costs.is_measured(share.worker)
        is_new = share.worker not in fluid.tried
        return is_new, -leaves, is_measured, len(share.pieces), share.worker

    return max(shares, key=rank).worker


def max_seconds(
    plan: Plan, state: State, size: int, taking_part: GroupedMembers, committer: str
) -> float:
    """Return the limit of a round."""
    own = plan.schedule.slot_deadline_s
    if own != "auto":
        return own
    costs = state.costs
    lines = {
        address: Line(size * costs.up_seconds(address), size * costs.down_seconds(address))
        for address in taking_part.addresses
    }
    seconds = round_seconds(lines.values(), lines[committer], taking_part.num_sums)
    return max(limits.MIN_EXCHANGE_S, MARGIN * seconds)


def is_by_store(state: State, fluid: FluidState, size: int, addresses: Sequence[str]) -> bool:
    """Return whether sums go through the object store, where no member waits for the total of
    another: a round came to nothing, or a measured line is slow."""
    costs = state.costs
    seconds = {address: size * costs.sum_seconds(address) for address in addresses}
    limit = max(MIN_SLOW_S, SLOW_LINE * min(seconds.values()))
    is_slow = any(seconds[each] > limit and costs.is_measured(each) for each in addresses)
    return is_slow or fluid.num_failures > 0


def unmet(plan: Plan, fluid: FluidState, exchange: ExchangeRound, silent: frozenset[str]) -> str:
    """Return in words what a round lacked."""
    command = exchange.command
    missed = {a for address, missing in exchange.missed.items() for a in missing if a != address}
    named = sorted(silent or missed or {command.committer})
    more = f" and {len(named) - 3} others" if len(named) > 3 else ""
    size = bytes_to_exchange(plan, fluid, command.shares)
    return (
        f"{', '.join(named[:3])}{more} did not exchange {size:,} bytes within "
        f"{command.max_seconds:.0f} s"
    )


def round_seconds(lines: Collection[Line], committer: Line, num_sums: int) -> float:
    """Return the seconds of a round: the slowest member gives its sum, the committer takes one of
    each other host or site and gives the total, and the slowest member takes that."""
    others = [line for line in lines if line is not committer]
    if num_sums < 2:
        return 0.0
    up, down = max(line.up for line in others), max(line.down for line in others)
    return up + (num_sums - 1) * committer.down + committer.up + down


def seconds_to_leave(state: State, fluid: FluidState, address: str) -> float:
    """Return the seconds in which a version leaves a member."""
    return VERSION_PARTS * fluid.sum_bytes * state.costs.up_seconds(address)
