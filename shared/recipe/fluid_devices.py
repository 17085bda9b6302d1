"""What fluid devices do not do: one answer for recipes that ask for them and plans that might."""

from shared.messages.fluid import MAX_MEMBERS
from shared.recipe.tables import Tables

OTHER = 'or schedule.mode to "pipelined"'


def refusal(
    *,
    devices: int = 1,
    hosts: int = 1,
    sharded: bool = False,
    max_staleness: int | str = 0,
) -> str | None:
    """Return why no recipe can ask this of fluid devices, with field and remedy; None if one can.

    Args:
        devices: `trainer.devices`.
        hosts: `trainer.hosts`.
        sharded: `trainer.sharded`.
        max_staleness: `schedule.max_staleness`.
    """
    refused = {
        f"trainer.devices: sums of more than {MAX_MEMBERS} fluid devices fit no message; set it to "
        f"at most {MAX_MEMBERS}": devices > MAX_MEMBERS,
        "trainer.hosts: fluid devices join from any hosts; set it to 1": hosts > 1,
        "trainer.sharded: every fluid device holds all weights; set it to false": sharded,
        "schedule.max_staleness: is not decided by costs for fluid devices; set it to 0 or 1": (
            max_staleness == "auto"
        ),
    }
    return next((f"{reason}, {OTHER}" for reason, applies in refused.items() if applies), None)


def refusal_of(tables: Tables) -> str | None:
    """Return why the devices of this recipe cannot be fluid, whatever its mode; None if they
    can."""
    return refusal(
        devices=tables.trainer.devices,
        hosts=tables.trainer.hosts,
        sharded=tables.trainer.sharded,
        max_staleness=tables.schedule.max_staleness,
    )
