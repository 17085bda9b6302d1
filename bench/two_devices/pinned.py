"""Start a program on some cores only, at a lower priority if asked:

    python -m bench.two_devices.pinned 0,1 5 PROGRAM ARGUMENTS...

In a process of its own, before the program's first thread: threads inherit both.
"""

import os
import sys
from collections.abc import Collection, Sequence


def pinned(argv: Sequence[str], cpus: Collection[int], *, nice: int = 0) -> list[str]:
    """The command line that runs ``argv`` on ``cpus``, ``nice`` steps below normal priority."""
    where = ",".join(str(cpu) for cpu in sorted(cpus))
    return [sys.executable, "-m", __name__, where, str(nice), *argv]


def main() -> None:
    cpus, nice, *argv = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.nice(int(nice))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
