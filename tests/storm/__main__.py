"""Runs a storm and prints what was done to which process, how far the run came, how long it took
to go on after each fault, and every rule that it broke: ``make chaos``."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.storm.faults import ALL_KINDS, GAP_S, KINDS
from tests.storm.storm import CALM_S, HELPED, LAGGED, through


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.storm", description="Disturb a run at random, and judge its records."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--minutes", type=float, help="over which the faults are spread")
    parser.add_argument(
        "--all", action="store_true",
        help="every kind of fault (tests/storm/faults.py), and a second scheduler",
    )  # fmt: skip
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--lags", action="store_true", help="other weights generate")
    parser.add_argument(
        "--calm", type=float, default=CALM_S, help="seconds in which it must go on afterwards"
    )
    parser.add_argument("--folder", type=Path, help="for logs, which then stay")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    changes = (LAGGED if asked.lags else HELPED) | {"max_staleness": asked.staleness}
    gap = asked.minutes * 60 / asked.faults if asked.minutes else GAP_S
    kinds = ALL_KINDS if asked.all else KINDS
    found = asyncio.run(
        through(
            folder,
            asked.seed,
            asked.faults,
            kinds=kinds,
            gap=gap,
            standby=asked.all,
            calm_s=asked.calm,
            **changes,
        )
    )
    lines = [*map(str, found.faults), f"{time.monotonic() - began:.0f} s", *found.lines()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
