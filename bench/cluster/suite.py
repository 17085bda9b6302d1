"""Every case of the performance tables."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from bench.cluster.case import WARM_UP_ONE_STEP, WARM_UP_STRICT, Case
from bench.cluster.modes import MODES
from bench.cluster.output import draw, run_in, show_case
from bench.cluster.request import WORKLOADS, Request
from bench.cluster.session import opened
from bench.stored import write_result

UNEQUAL = ("a100", "h20", "l40s")
"""Kinds beside 16 H100s."""
BATCH_SECONDS = 4.0
"""Rough seconds of an emulated batch; sequential ones take twice that."""
RUN_SECONDS = 5.0
"""Seconds that a run takes to start and to end."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A case, with the name of its file."""

    name: str
    request: Request
    pictures: bool = False

    @property
    def seconds(self) -> float:
        """Estimates how long it takes."""
        return self.request.rounds * sum(self._run_seconds(mode) for mode in self.request.modes)

    def _run_seconds(self, mode: str) -> float:
        schedule, batches = MODES[mode], self.request.batches
        if schedule.max_staleness:
            batches = WARM_UP_ONE_STEP + self.request.one_step_batches
        else:
            batches += WARM_UP_STRICT
        slower = 2 if schedule.mode == "sequential" else 1
        return RUN_SECONDS + BATCH_SECONDS * batches * slower


def planned(cases: Sequence[Planned]) -> list[Case]:
    """Finds splits and fragment sizes on all cores, before anything is measured."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(Request.case, [case.request for case in cases]))


def full() -> list[Planned]:
    """Returns every case, model by model."""
    return [case for workload in WORKLOADS for case in _of(workload)]


def quick() -> list[Planned]:
    """Returns both ends of the ladder, and gradient help, on the model with the most messages."""
    request = Request(
        workload="qwen-image",
        modes=("sequential", "tag", "one-step"),
        rounds=1,
        batches=2,
        one_step_batches=4,
    )
    return [
        Planned("qwen-image-32", request, pictures=True),
        Planned("qwen-image-24-8", replace(request, modes=("help",), split="24:8")),
    ]


def _of(workload: str) -> list[Planned]:
    equal = Request(workload=workload, batches=2, one_step_batches=4)
    once = replace(equal, rounds=1, one_step_batches=5)
    slow = replace(once, one_step_batches=4)
    # Qwen-Image's batches are shorter than a slow device's fragment, and come in cycles.
    unequal = replace(once, one_step_batches=12 if workload == "qwen-image" else 5)
    return [
        Planned(f"{workload}-32", equal, pictures=True),
        Planned(
            f"{workload}-16",
            replace(once, pool="h100=16", modes=("tag", "one-step")),
        ),
        *(
            Planned(
                f"{workload}-16-{kind}-16",
                replace(unequal, pool=f"h100=16,{kind}=16", modes=("one-step",)),
            )
            for kind in UNEQUAL
        ),
        # Splits that are far from the best one, without and with what makes up for it.
        Planned(f"{workload}-8-24", replace(once, split="8:24", modes=("tsp", "tag", "one-step"))),
        Planned(f"{workload}-24-8", replace(slow, split="24:8", modes=("one-step", "help"))),
    ]


async def run_all(
    cases: Sequence[Planned], results: Path, pictures: Path, folder: Path, console: Console
) -> None:
    """Measures the cases over the same brokers, and writes each as soon as it is measured."""
    console.print("planning all of them ...")
    plans = planned(cases)
    async with opened(folder) as session:
        for case, plan in zip(cases, plans, strict=True):
            finished = await run_in(session, plan, console)
            show_case(finished.result, console)
            write_result(results / f"{case.name}.json", asdict(finished.result))
            if case.pictures:
                draw(finished, pictures)
