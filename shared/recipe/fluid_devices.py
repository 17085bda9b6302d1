"""How many devices can train together: one answer for recipes and plans."""

from shared.messages.fluid import MAX_MEMBERS


def refusal(devices: int) -> str | None:
    """Return why this many devices cannot train together, with field and remedy; None if they
    can."""
    if devices <= MAX_MEMBERS:
        return None
    return (
        f"trainer.devices: sums of more than {MAX_MEMBERS} devices fit no message; set it to at "
        f"most {MAX_MEMBERS}"
    )
