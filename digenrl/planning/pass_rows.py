"""Reports how many rows of a training pass fit the devices of a recipe, and the cost of small
passes."""

from collections.abc import Iterator

from digenrl.planning.own_split import OwnSplit
from digenrl.planning.remedies import row_remedy
from digenrl.trace.memory import ModelUse
from services.scheduler.costs.capacity import TARGET_ROWS, fitting_rows, pass_rows, training_role
from services.scheduler.costs.profile import Profile, Role, device
from services.scheduler.costs.seconds import pass_seconds
from services.scheduler.costs.split import present

MAX_FEW_ROWS_COST = 0.03
"""Share of training that few rows may cost before a line warns of it."""


def rows_lines(profile: Profile, use: ModelUse, own: OwnSplit) -> Iterator[str]:
    """Yield a line for each kind of device that trains."""
    if not profile.variant.row_gib:
        return
    role = training_role(own.schedule)
    for kind in present(own.split.trainer):
        rows = pass_rows(profile, kind, role)
        fitting = fitting_rows(profile, kind, role)
        line = f"rows of a training pass on {kind}: {rows} ({fitting} fit)"
        yield line + _warning(profile, use, kind, role, rows)


def _warning(profile: Profile, use: ModelUse, kind: str, role: Role, rows: int) -> str:
    wanted, rate = min(TARGET_ROWS, profile.shape.group_size), device(profile, kind).training_speed
    few, more = (pass_seconds(profile, each, rate, kind) / each for each in (rows, wanted))
    if rows >= wanted or few <= (1 + MAX_FEW_ROWS_COST) * more:
        return ""
    remedy = row_remedy(profile, use, kind, role, wanted)
    text = f"with {remedy}" if remedy else "which need more memory for each device"
    return f"; training takes {few / more:.2f} times as long as in passes of {wanted}, {text}"
