"""Wall clocks of single processes that jump when a test asks for it: nothing may go by them."""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

LONGEST_S = 86_400.0


def set_clock(folder: Path, name: str, draw: random.Random) -> None:
    """Write by how much a process's clock is to be wrong, now and after its next start.

    The process looks when it gets SIGUSR1.
    """
    (folder / f"clock-{name}").write_text(str(draw.uniform(-LONGEST_S, LONGEST_S)))


@contextmanager
def able_to_jump(folder: Path, name: str) -> Iterator[None]:
    """Run a process whose wall clock may be set."""
    asked, true_time, wrong_by = folder / f"clock-{name}", time.time, 0.0

    def look(*_: object) -> None:
        nonlocal wrong_by
        wrong_by = float(asked.read_text()) if asked.exists() else 0.0

    look()
    signal.signal(signal.SIGUSR1, look)
    with patch.object(time, "time", lambda: true_time() + wrong_by):
        yield
