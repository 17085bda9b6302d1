"""Two ranks of a shard group, for all tests that need some."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from digenrl.local.processes.ports import free_ports
from tests.trainer.fluid.ranks_program import Job

RANKS = 2
PATIENCE_S = 240


class Ranks:
    """Two ranks, started as `digenrl up` starts them, that are given one job after the other."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        names = [f"{kind}-{rank}" for kind in ("jobs", "answers") for rank in range(RANKS)]
        for name in names:
            os.mkfifo(folder / name)
        command = [sys.executable, "-m", "digenrl.local.processes.ranks", str(RANKS)]
        program = ["tests.trainer.fluid.ranks_program"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *program, str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "MALLOC_MMAP_THRESHOLD_": "65536",
                },  # what is freed is given back
            )
        # A pipe is opened for both directions, so that nobody waits for a rank that has died.
        opened = {name: os.open(folder / name, os.O_RDWR) for name in names}
        self._jobs = [opened[f"jobs-{rank}"] for rank in range(RANKS)]
        self._answers = [opened[f"answers-{rank}"] for rank in range(RANKS)]

    def do(self, what: str, folder: Path, *, codes: tuple[int, ...] = (0,) * RANKS) -> None:
        """``codes``: with which each rank has to end."""
        job = json.dumps(Job(what, str(folder), free_ports(1)[0])).encode() + b"\n"
        for jobs in self._jobs:
            os.write(jobs, job)
        for answers, code in zip(self._answers, codes, strict=True):
            ready, _, _ = select.select([answers], [], [], PATIENCE_S)
            assert ready and os.read(answers, 100) == b"%d\n" % code, self.log.read_text()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        for pipe in [*self._jobs, *self._answers]:
            os.close(pipe)
