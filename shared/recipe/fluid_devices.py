"""How many devices can be fluid: one answer for recipes and plans."""

from shared.messages.fluid import MAX_MEMBERS


def refusal(devices: int) -> str | None:
    """Return why so many devices cannot be fluid, with field and remedy; None if they can."""
    if devices <= MAX_MEMBERS:
        return None
    return (
        f"trainer.devices: sums of more than {MAX_MEMBERS} fluid devices fit no message; set it to "
        f'at most {MAX_MEMBERS}, or schedule.mode to "pipelined"'
    )
