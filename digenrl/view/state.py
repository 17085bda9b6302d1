"""What a run does, in figures and sentences: of a live one from its scheduler, of one that is over
from its store."""

from collections.abc import Collection, Sequence

from pydantic import BaseModel, ConfigDict

from digenrl.api.run_history import RECENT, RunHistory
from digenrl.api.stored import load_view, run_view
from digenrl.client import Client, Refused
from digenrl.reading import sentences
from digenrl.reading.schedule import summarise_schedule
from digenrl.reading.wording import crew, time_left
from services.scheduler.core.state import Phase
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, WorkerView
from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.run.usage import BatchUsage

VERSIONS = 50
"""Versions that are compared."""


class RunState(BaseModel):
    """Answers the first questions about a run."""

    model_config = ConfigDict(frozen=True)

    run: str
    status: str
    """What it does now, in words."""
    phase: Phase
    """Phase that the scheduler reports, or in which a run that is over has ended."""
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
    """For what devices wait most, and which setting may change that; empty if it has failed."""
    throughput: str
    """How much gets done of what could be, and where to look if it is little."""
    alarms: list[str]
    load: LoadView
    """Throughput against what is possible, and where samples wait, as the API shows it."""
    workers: list[WorkerView]
    """Live workers, as the API shows them."""

    def lines(self) -> list[str]:
        """Return the state as a person reads it."""
        left = "" if self.eta_seconds is None else f", {time_left(self.eta_seconds)} left"
        reward = "" if self.reward_mean is None else f", reward {self.reward_mean:.3f}"
        workers = crew([each.model_dump() for each in self.workers])
        return [
            f"{self.run}: {self.status}; step {self.step} of {self.steps}{reward}{left}",
            *(f"! {alarm}" for alarm in self.alarms),
            *([self.bottleneck] if self.bottleneck else []),
            *([self.throughput] if self.throughput else []),
            *([f"workers: {workers}"] if workers else []),
        ]


def live_state(
    client: Client, evaluation: Sequence[str] = (), recipe: Recipe | None = None
) -> RunState:
    """Return the state of a run that goes on.

    Args:
        evaluation: alarms of its newest evaluation, which its scheduler does not know.
        recipe: that of the run, if this machine has it: its scheduler does not show it.

    Raises:
        NoAnswer: if its scheduler does not answer.
        Refused: if it refuses.
    """
    run = client.get_run()
    usage: list[BatchUsage] = []
    for batch in range(max(0, run.step - RECENT), run.step):
        try:
            found = client.get_usage(batch)
        except Refused:
            continue  # of batches that another scheduler opened, nothing is known
        usage.append(BatchUsage.model_validate(found.model_dump()))
    status = sentences.status(run.model_dump(), run.step, run.steps)
    workers, load = client.list_workers(), client.get_load()
    letters = client.list_dead_letters("all", sentences.MOST_LETTERS)
    unsettled = sentences.unsettled([each.model_dump() for each in letters])
    alarms = sentences.alarms(
        run.model_dump(), (), evaluation, [each.model_dump() for each in workers], unsettled
    )
    newest = client.list_versions(VERSIONS)[::-1]
    recipe = recipe or _recipe(client)
    decay_steps = None if recipe is None else recipe.trainer.decay_steps
    digests = [(each.version, each.weights_digest) for each in newest]
    alarms += sentences.frozen(digests, decay_steps)
    alarms += sentences.late([each.model_dump() for each in load.queues])
    fails = sentences.is_failing(run.model_dump(), unsettled)
    settings = sentences.settings_of(run.model_dump(), recipe, client.get_tag().mode)
    return _state(run, usage, alarms, status, load, workers, settings, fails=fails)


def _recipe(client: Client) -> Recipe | None:
    """Return the run's recipe, which the process of its page knows; None from others."""
    try:
        return Recipe.model_validate(client.get_recipe().recipe)
    except (Refused, ValueError):
        return None


async def stored_state(history: RunHistory) -> RunState:
    """Return the state of a run that is over.

    Raises:
        UserError: if the store holds no such run.
        Unavailable: if it does not answer.
    """
    run = await run_view(history)
    if run is None or history.recipe is None:
        raise UserError(f"--run: the store holds no run {history.run!r}")
    usage = [history.usage[each] for each in sorted(history.usage)]
    exact = history.recipe.largest_weight is None
    newest = history.evaluations[-1].alarms if history.evaluations else ()
    alarms = sentences.alarms(
        run.model_dump(), history.steps, newest,
        decay_steps=history.recipe.trainer.decay_steps, is_exact=exact,
    )  # fmt: skip
    ended = run.phase in ("finished", "failed")
    status = run.phase if ended else sentences.status(None, history.version, run.steps)
    return _state(run, usage, alarms, status, await load_view(history))


def _state(
    run: RunView,
    usage: Sequence[BatchUsage],
    alarms: list[str],
    status: str,
    load: LoadView,
    workers: Sequence[WorkerView] = (),
    settings: Collection[str] | None = None,
    *,
    fails: bool = False,
) -> RunState:
    schedule = summarise_schedule([], list(usage))
    if run.phase == "failed":  # its alarms say what helps
        bottleneck = ""
    else:
        bottleneck = sentences.bottleneck(schedule, run.run, settings, fails=fails)
    waits = sentences.main_wait(schedule)
    slow = sentences.slow_scorer(waits, [each.model_dump() for each in workers])
    bottleneck = " ".join(filter(None, (bottleneck, slow if bottleneck else "")))
    throughput = sentences.throughput(
        load.model_dump(), waits, run.run, advises=settings is not None
    )
    return RunState(
        run=run.run, status=status, phase=run.phase, step=run.step, steps=run.steps,
        eta_seconds=run.eta_seconds, reward_mean=run.reward_mean,
        seconds_per_step=schedule.seconds_per_step, utilisation=schedule.utilisation,
        bottleneck=bottleneck, throughput=throughput, alarms=alarms, load=load,
        workers=list(workers),
    )  # fmt: skip
