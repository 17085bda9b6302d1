"""Starts the ranks of a trainer on this host, as torchrun would.

python -m digenrl.local.processes.ranks N MODULE ARGUMENTS

The ranks are forked after what they import, where a starter has imported it or MODULE does. If one
fails, the others are ended; the exit status comes from the first one that failed, 1 for a signal.
"""

import importlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence

from digenrl.local.limits import RANKS_STOP_S
from digenrl.local.processes.ports import free_ports
from digenrl.local.processes.starter_process import check_fit, set_title, take_own_randomness
from shared.process.linux import die_with_parent


def main(num_ranks: int, words: Sequence[str]) -> None:
    """Fork ``num_ranks`` processes that run a module with its arguments, and wait for all."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    importlib.import_module(words[0])
    if sys.platform == "linux":
        check_fit()
    [port] = free_ports(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    ranks = set[int]()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _be_a_rank(words)
            return
        ranks.add(pid)
    sys.exit(_wait_for(ranks))


def _be_a_rank(words: Sequence[str]) -> None:
    if sys.platform == "linux":
        die_with_parent()
        set_title([sys.executable, "-m", *words])
    take_own_randomness()
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _wait_for(ranks: set[int]) -> int:
    """Return the exit status; when one fails, or after a stop signal, end the others."""

    def end(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        signal.alarm(RANKS_STOP_S)

    def kill(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGALRM, kill)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = max(code, 1)
            end()
    return failed


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
