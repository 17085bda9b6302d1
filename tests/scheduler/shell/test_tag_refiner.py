"""The look-ahead beside the event loop."""

import asyncio
from dataclasses import replace

from services.scheduler.core.inputs import MachineInput, TagRefined, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import LoanState, Plan, State, TagRecord
from services.scheduler.core.tag.controller import Controller
from services.scheduler.core.tag.estimates import Costs
from services.scheduler.shell.tag_refiner import TagRefiner
from tests import examples


def learned() -> Costs:
    """Generation takes long, training is short: help pays."""
    costs = Costs().observe_rollout("a-0", 10.0).observe("help", 10.0).observe("train", 1.0)
    return costs.observe("ready", 0.1).observe("commit", 0.5)


def batch_opened(mode: str = "auto") -> tuple[Plan, State, State]:
    plan = examples.plan(num_groups=6)
    controller = Controller(mode=mode)  # type: ignore[arg-type]
    before = State(tag=LoanState(controller=controller), costs=learned())
    for event in (WorkerJoined("a-0", "a", "rollout"), WorkerJoined("t-0", "t", "trainer")):
        before, _ = step(plan, before, event, 0.0)
    after, _ = step(plan, before, examples.published(0), 1.0)
    return plan, before, after


def told_within(
    refiner: TagRefiner, told: list[MachineInput], seconds: float
) -> list[MachineInput]:
    async def run() -> None:
        running = asyncio.create_task(refiner.run())
        for _ in range(int(seconds / 0.01)):
            if told:
                break
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(run())
    return told


def test_a_batch_that_opens_is_looked_ahead_for_once() -> None:
    plan, before, after = batch_opened()
    told: list[MachineInput] = []
    refiner = TagRefiner(plan, told.append)
    refiner.record(before, after)
    refiner.record(after, after)
    [refined] = told_within(refiner, told, 20)
    assert isinstance(refined, TagRefined)
    assert refined.batch == 0 and 1 <= refined.groups <= 5


def test_nothing_is_looked_ahead_for_where_an_operator_decides() -> None:
    plan, before, after = batch_opened("off")
    told: list[MachineInput] = []
    refiner = TagRefiner(plan, told.append)
    refiner.record(before, after)
    assert told_within(refiner, told, 0.2) == []


def test_a_look_ahead_that_would_take_much_of_a_batch_is_left_out() -> None:
    plan, before, after = batch_opened()
    record: TagRecord = replace(after.tag.history[-1], seconds=1.0)
    after = replace(after, tag=replace(after.tag, history=(record,)))
    told: list[MachineInput] = []
    refiner = TagRefiner(plan, told.append)
    refiner._last_seconds = 0.1
    refiner.record(before, after)
    assert told_within(refiner, told, 0.2) == []
    refiner._last_seconds = 0.01
    refiner.record(before, after)
    assert len(told_within(refiner, told, 20)) == 1
