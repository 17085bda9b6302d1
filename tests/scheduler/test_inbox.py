"""Scores go before what waits, and nothing else changes places."""

from services.scheduler.inbox import Inbox
from services.scheduler.machine import Input, Tick, WorkerLeft
from shared.contracts import Fragment, FragmentScored, ObjectRef, Policy, Trajectories

REF = ObjectRef(key="run/object", sha256="0" * 64, size=1)


def scored(group: int) -> FragmentScored:
    return FragmentScored(
        fragment=Fragment(batch=0, group=group, first_sample=0, num_samples=1, attempt=0),
        policy=Policy(version=0, weights_digest="0" * 64),
        stored=Trajectories(trajectory=REF, conditions=REF, media=REF, weights_digest="0" * 64),
        rewards=(1.0,),
        parts={"emulated": (1.0,)},
        generated_by="rollout-0",
        worker="reward-0",
        seconds=0.0,
    )


async def test_scores_come_first_and_everything_else_as_it_came() -> None:
    inbox = Inbox()
    first, second = scored(0), scored(1)
    told: list[Input] = [WorkerLeft("a"), first, Tick(), WorkerLeft("b"), second]
    for event in told:
        inbox.put(event)
    taken = [await inbox.get() for _ in told]
    assert taken == [first, second, WorkerLeft("a"), Tick(), WorkerLeft("b")]
