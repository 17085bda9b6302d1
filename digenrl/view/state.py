"""What a run does, in figures and sentences: of a live one from its scheduler, of one that is over
from its store."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from digenrl.report.summary import summarise_schedule
from digenrl.view import sentences
from digenrl.view.history import RECENT, RunHistory
from digenrl.view.live import LiveRun
from services.scheduler.core.usage import BatchUsage
from shared.errors import UserError


class RunState(BaseModel):
    """Answers the first questions about a run."""

    model_config = ConfigDict(frozen=True)

    run: str
    status: str
    """What it does now, in words."""
    phase: str
    """Phase that the scheduler reports; over: there is no scheduler."""
    step: int
    """Optimizer steps committed."""
    steps: int
    """Optimizer steps that the recipe asks for."""
    eta_seconds: float | None
    reward_mean: float | None
    """Mean reward of the newest committed batch."""
    seconds_per_step: float | None
    """Median over the newest batches."""
    utilisation: float | None
    """Share of their time that rollout and trainer devices worked, over the newest batches."""
    bottleneck: str
    """For what devices wait most, and which setting may change that."""
    alarms: list[str]
    workers: list[dict[str, Any]]
    """Live workers, as the API shows them."""

    @property
    def is_over(self) -> bool:
        return self.phase in ("over", "finished", "stopped", "failed")

    def lines(self) -> list[str]:
        """Return the state as a person reads it."""
        left = "" if self.eta_seconds is None else f", {_clock(self.eta_seconds)} left"
        reward = "" if self.reward_mean is None else f", reward {self.reward_mean:.3f}"
        counts: dict[str, int] = {}
        for worker in self.workers:
            counts[worker["service"]] = counts.get(worker["service"], 0) + 1
        workers = ", ".join(f"{number} {service}" for service, number in counts.items())
        return [
            f"{self.run}: {self.status}; step {self.step} of {self.steps}{reward}{left}",
            *([f"workers: {workers}"] if workers else []),
            self.bottleneck,
            *(f"! {alarm}" for alarm in self.alarms),
        ]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


async def live_state(live: LiveRun) -> RunState | None:
    """Return the state of a run that goes on; None if its scheduler does not answer."""
    run = await live.get("/v1/run")
    if run is None:
        return None
    workers = await live.get("/v1/workers") or []
    usage: list[BatchUsage] = []
    for batch in range(max(0, run["step"] - RECENT), run["step"]):
        found = await live.get(f"/v1/batches/{batch}/usage")
        if found is not None:
            usage.append(BatchUsage.model_validate(found))
    return _state(run["run"], run, usage, workers=workers)


async def stored_state(history: RunHistory) -> RunState:
    """Return the state of a run that is over.

    Raises:
        UserError: if the store holds no such run.
        Unavailable: if it does not answer.
    """
    await history.look()
    if history.recipe is None:
        raise UserError(f"--run: the store holds no run {history.run!r}")
    usage = [history.usage[each] for each in sorted(history.usage)]
    exact = history.recipe.largest_weight is None
    newest = history.evaluations[-1].alarms if history.evaluations else ()
    wanted = history.recipe.run.steps
    step = max(0, history.version)
    run = {
        "phase": "over", "step": step, "steps": wanted, "eta_seconds": None,
        "reward_mean": history.steps[-1].metrics.get("reward_mean") if history.steps else None,
    }  # fmt: skip
    alarms = sentences.alarms(None, history.steps if exact else (), newest)
    status = sentences.status(None, history.version, wanted)
    return _state(history.run, run, usage, alarms=alarms, status=status)


def _state(
    name: str,
    run: dict[str, Any],
    usage: Sequence[BatchUsage],
    *,
    workers: Sequence[dict[str, Any]] = (),
    alarms: list[str] | None = None,
    status: str | None = None,
) -> RunState:
    schedule = summarise_schedule([], list(usage))
    return RunState(
        run=name,
        status=sentences.status(run, run["step"], run["steps"]) if status is None else status,
        phase=run["phase"], step=run["step"], steps=run["steps"], eta_seconds=run["eta_seconds"],
        reward_mean=run["reward_mean"], seconds_per_step=schedule.seconds_per_step,
        utilisation=schedule.utilisation, bottleneck=sentences.bottleneck(schedule),
        alarms=sentences.alarms(run, (), ()) if alarms is None else alarms, workers=list(workers),
    )  # fmt: skip
