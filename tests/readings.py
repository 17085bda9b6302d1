"""What a scheduler reports of a run, for tests of what is read from it."""

from typing import Any

from digenrl.reading.facts import RunFacts, StepFacts
from services.scheduler.shell.api_letters import DeadLetterView
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, WorkerView

NOW = 1795447812.0
"""When a reading is made, by the Unix clock."""
RUN: dict[str, Any] = {
    "run": "test", "release": "0.2.0", "phase": "running", "step": 4, "steps": 30,
    "policy_version": 4, "reward_mean": 0.5, "effective_sample_share": None,
    "seconds_per_step": 4.0, "eta_seconds": 83.0, "waiting_for": "nothing",
    "num_workers": {"rollout": 1},
    "missing_workers": [], "num_quarantined": 0, "num_dead_letters": 0, "pause_at_failure": False,
    "failure": None, "alarms": [], "max_staleness": 0, "max_staleness_reason": None,
}  # fmt: skip
WORKER: dict[str, Any] = {
    "worker": "rollout-0", "address": "rollout-0-1", "service": "rollout", "host": "node7",
    "site": "home", "url": "", "device": "NVIDIA H100 80GB HBM3", "gpu": "0",
    "memory_bytes": 85_000_000_000,
    "activity": "generating", "versions": {"torch": "2.10.0"}, "note": "", "use": "generating",
    "policy_version": 4, "num_done": 96, "busy_seconds": 310.2, "num_quarantined": 0,
    "refused": None, "drain": "no", "lent": False, "loan_number": None,
    "seconds_per_sample": 0.42, "num_in_hand": 2, "seconds_per_gradient": None,
    "seconds_since_seen": 0.3, "memory_shortage": None,
    "bytes_up": 0, "seconds_up": 0.0, "mbits_up": None,
    "bytes_down": 0, "seconds_down": 0.0, "mbits_down": None, "round_trip_seconds": None,
    "declines": "", "gpu_use": None,
}  # fmt: skip
LOAD: dict[str, Any] = {
    "samples_per_second": 10.0, "forecast_samples_per_second": 20.0,
    "bound_samples_per_second": 22.0,
    "queues": [
        {"queue": "generation", "samples": 96, "oldest_seconds": 1.5, "usual_seconds": 4.0,
         "late": False, "worker": None},
        {"queue": "in_hand", "samples": 8, "oldest_seconds": 61.0, "usual_seconds": 1.7,
         "late": True, "worker": "rollout-0"},
        {"queue": "scoring", "samples": 0, "oldest_seconds": None, "usual_seconds": None,
         "late": False, "worker": None},
        {"queue": "training", "samples": 8, "oldest_seconds": 0.2, "usual_seconds": 0.6,
         "late": False, "worker": None},
    ],
    "slowest": {"worker": "rollout-0", "seconds_per_sample": 0.9, "mean_seconds_per_sample": 0.42},
}  # fmt: skip


def run(**changes: Any) -> RunView:
    return RunView.model_validate(RUN | changes)


def worker(**changes: Any) -> WorkerView:
    return WorkerView.model_validate(WORKER | changes)


def load(**changes: Any) -> LoadView:
    return LoadView.model_validate(LOAD | changes)


def letter(reason: str, seconds: float, state: str = "open") -> DeadLetterView:
    """Return a dead letter of an attempt that failed so many seconds ago."""
    return DeadLetterView.model_validate({
        "number": 1, "kind": "failed", "state": state, "stream": "DG_EVT", "subject": "",
        "reason": reason, "work": None, "found": NOW - seconds, "num_bytes": 1, "outcome": "",
    })  # fmt: skip


def step(version: int, weights: int, **metrics: float) -> StepFacts:
    """Return a step that has left weights of this number."""
    return StepFacts(version, f"{weights:064d}", metrics)


def facts(now: RunView | None = None, **more: Any) -> RunFacts:
    known: dict[str, Any] = {"run": now or run(), "is_live": True, "at": NOW}
    return RunFacts(**(known | more))
