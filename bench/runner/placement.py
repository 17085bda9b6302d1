"""Processes on cores: two devices have one each, everybody else what is left.

    python -m bench.runner.placement 0,1 PROGRAM ARGUMENTS...

starts a program on some cores, in a process of its own before the program's first thread.
"""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    rollout: int
    """The core of the device that only generates, unless it is asked for gradients."""
    trainer: int
    others: tuple[int, ...]
    """Cores of scheduler, reward and brokers."""

    @property
    def shared(self) -> bool:
        """Whether the others take their time from the two devices."""
        return self.rollout in self.others

    @property
    def words(self) -> str:
        where = "on both" if self.shared else f"on {len(self.others)} others"
        return (
            f"rollout on core {self.rollout}, trainer on core {self.trainer}, "
            f"scheduler, reward and brokers {where}"
        )


def place(cpus: Sequence[int], core_of: Callable[[int], str]) -> Placement:
    """Makes the first two different cores the devices, whatever threads they have.

    Raises:
        UserError: if there is only one core.
    """
    chosen: dict[str, int] = {}
    for cpu in sorted(cpus):
        chosen.setdefault(core_of(cpu), cpu)
    if len(chosen) < 2:
        raise UserError(
            f"two devices need two cores, and this process may use {len(chosen)}; see taskset"
        )
    (first, rollout), (second, trainer) = list(chosen.items())[:2]
    free = tuple(cpu for cpu in sorted(cpus) if core_of(cpu) not in (first, second))
    return Placement(rollout, trainer, free or (rollout, trainer))


def this_machine() -> Placement:
    """Raises UserError where processes cannot be pinned, or there is one core only."""
    if sys.platform != "linux":
        raise UserError("bench two-devices pins processes to cores, which only Linux can")
    return place(sorted(os.sched_getaffinity(0)), physical_core)


def physical_core(cpu: int) -> str:
    """Returns the hardware threads of the core of ``cpu``; itself where the kernel does not say."""
    try:
        return (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def cpu_seconds(pid: int) -> float:
    """Returns what a process has used so far, all threads; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Without the first two fields, user and system time are the 12th and 13th (proc(5)).
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pinned(argv: Sequence[str], cpus: Collection[int]) -> list[str]:
    """Returns the command line that runs ``argv`` on ``cpus``."""
    return [sys.executable, "-m", __name__, ",".join(map(str, sorted(cpus))), *argv]


def main() -> None:
    cpus, *argv = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
