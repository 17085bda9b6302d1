"""Decides by the measured rates of members' lines how long a round may take, and who commits."""

from collections.abc import Collection, Sequence

from services.scheduler import limits
from services.scheduler.core.fluid.fluid_state import ExchangeRound, FluidState
from services.scheduler.core.state import Plan, State
from services.scheduler.core.tag.estimates import Costs
from shared.messages.fluid import Share

UNMEASURED_RATE = 125e6
"""Bytes per second of a line of which no transfer was measured: 1 Gbit/s."""
MARGIN = 2.0
"""Times what a round takes by the measured rates before it is given up: rates change."""
VERSION_PARTS = 4
"""A version's weights, moments and average, each of as many bytes as a sum."""


def sum_bytes(fluid: FluidState) -> int:
    """Return the bytes of a sum; 0 if no member has reported them."""
    return max((each.sum_bytes for each in fluid.holds.values()), default=0)


def bytes_to_exchange(plan: Plan, fluid: FluidState, shares: Sequence[Share]) -> int:
    """Return the bytes that a member exchanges: its sum, or in deterministic mode one sum of each
    group."""
    size = sum_bytes(fluid)
    if not plan.schedule.deterministic:
        return size
    return size * max(len({piece.group for piece in share.pieces}) for share in shares)


def choose_committer(state: State, fluid: FluidState, shares: Sequence[Share]) -> str:
    """Return the member from which the version leaves soonest, in whole seconds; of equal ones, a
    measured one before others, and the one with most pieces. Committers that were too slow in the
    rounds before come last."""

    def rank(share: Share) -> tuple[bool, float, bool, int, str]:
        is_new = share.worker not in fluid.tried
        is_measured = share.worker in state.costs.up or share.worker in state.costs.down
        leaves = seconds_to_leave(state, fluid, share.worker) // 1
        return is_new, -leaves, is_measured, len(share.pieces), share.worker

    return max(shares, key=rank).worker


def max_seconds(
    plan: Plan, state: State, size: int, addresses: Collection[str], committer: str
) -> float:
    """Return the limit of a round."""
    own = plan.schedule.slot_deadline_s
    if own != "auto":
        return own
    return max(limits.MIN_EXCHANGE_S, MARGIN * _round_seconds(state, size, addresses, committer))


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


def _round_seconds(state: State, size: int, addresses: Collection[str], committer: str) -> float:
    """Return the seconds of a round: the slowest member gives its sum, the committer takes all of
    them and gives the total, and the slowest member takes that."""
    others = [address for address in addresses if address != committer]
    if not others:
        return 0.0
    costs = state.costs
    up, down = (max(seconds(costs, each) for each in others) for seconds in (_up, _down))
    return size * (up + len(others) * _down(costs, committer) + _up(costs, committer) + down)


def seconds_to_leave(state: State, fluid: FluidState, address: str) -> float:
    """Return the seconds in which a version leaves a member."""
    return VERSION_PARTS * sum_bytes(fluid) * _up(state.costs, address)


def _up(costs: Costs, address: str) -> float:
    """Return the seconds per byte on the way up; where that was not measured, on the way down."""
    estimate = costs.up.get(address) or costs.down.get(address)
    return 1 / UNMEASURED_RATE if estimate is None else estimate.seconds


def _down(costs: Costs, address: str) -> float:
    estimate = costs.down.get(address)
    return _up(costs, address) if estimate is None else estimate.seconds
