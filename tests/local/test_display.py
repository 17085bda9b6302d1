"""What a person sees while a local run goes on."""

import io
from typing import Any

from rich.console import Console

from digenrl.local.display import Display

RUN = {
    "run": "digits", "phase": "running", "step": 3, "steps": 30, "reward_mean": 0.5,
    "eta_seconds": 60.0, "waiting_for": "rollout",
}  # fmt: skip
WORKER = {
    "worker": "rollout-0", "host": "alpha", "device": "NVIDIA H100", "gpu": "5",
    "service": "rollout", "activity": "generating", "use": None, "refused": None, "lent": False,
    "policy_version": 2, "num_done": 4, "busy_seconds": 7.0, "seconds_per_sample": 0.25,
}  # fmt: skip


def test_the_table_says_on_which_host_and_gpu_each_worker_is() -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=160), "url", "logs")
    cpu: dict[str, Any] = WORKER | {"worker": "reward-0", "device": "cpu", "gpu": ""}
    with display.shown():
        display.update(RUN, [WORKER, cpu])
    lines = screen.getvalue().splitlines()
    rollout = next(line for line in lines if "rollout-0" in line).split()
    assert rollout[:5] == ["rollout-0", "alpha", "NVIDIA", "H100", "5"]
    assert next(line for line in lines if "reward-0" in line).split()[:4] == [
        "reward-0", "alpha", "cpu", "-",
    ]  # fmt: skip
