"""Which numbers a port may have."""

from shared.errors import UserError

LAST_PORT = 65535


def check_port(port: int) -> None:
    """Raises UserError unless there is a port of this number."""
    if not 0 <= port <= LAST_PORT:
        raise UserError(
            f"--port: {port} is no port; choose one up to {LAST_PORT}, or 0 for a free one"
        )
