"""What fluid devices do not do: one answer for recipes that ask for them and plans that might."""

from shared.messages.fluid import MAX_MEMBERS
from shared.recipe.tables import Tables

OTHER = 'or schedule.mode to "pipelined"'


def refusal(*, devices: int = 1, hosts: int = 1) -> str | None:
    """Return why no recipe can ask this of fluid devices, with field and remedy; None if one can.

    Args:
        devices: `trainer.devices`.
        hosts: `trainer.hosts`.
    """
    refused = {
        f"trainer.devices: sums of more than {MAX_MEMBERS} fluid devices fit no message; set it to "
        f"at most {MAX_MEMBERS}": devices > MAX_MEMBERS,
        "trainer.hosts: fluid devices join from any hosts; set it to 1": hosts > 1,
    }
    return next((f"{reason}, {OTHER}" for reason, applies in refused.items() if applies), None)


def refusal_of(tables: Tables) -> str | None:
    """Return why the devices of this recipe cannot be fluid, whatever its mode; None if they
    can."""
    return refusal(devices=tables.trainer.devices, hosts=tables.trainer.hosts)
