"""A run of which one batch with everything was committed, in a folder of objects."""

import asyncio
from pathlib import Path

import numpy as np
import safetensors.numpy

from shared.messages.contracts import Fragment, FragmentScored, ObjectRef, TrainGroup, Trajectories
from shared.run.commands import store_commands
from shared.run.commits import commit
from shared.run.layout import batch_folder
from shared.run.log_entries import Work
from tests import examples
from tests.follow.runs import RUN, Run
from tests.run_log import append, letter

REWARDS = ((0.5, 0.25, 1.0, 0.0), (None, 0.75, 0.5, 0.5))
PIXELS = np.arange(4 * 3 * 2 * 5, dtype=np.uint8).reshape(4, 3, 2, 5)


def past_run(folder: Path) -> Run:
    run = Run(folder).begin()
    asyncio.run(_commit_batch(run))
    return run


async def _commit_batch(run: Run) -> None:
    media = await run.store.put(
        batch_folder(RUN, 0), safetensors.numpy.save({"images": PIXELS}), suffix=".media"
    )
    groups = [_group(number, media) for number in range(len(REWARDS))]
    commands = await store_commands(run.store, RUN, 0, groups)
    assert run.head is not None
    trained = tuple(
        examples.trained_group(
            number, rewards=rewards, parts={"proxy": rewards}, fragments=((0, 4, number),)
        )
        for number, rewards in enumerate(REWARDS)
    )
    run.head = examples.record(
        1, run.head, run=RUN, commands=commands, metrics={"reward_mean": 0.5}, trained=trained
    )
    await commit(run.store, run.head)
    work = Work(batch=0, group=1, first_sample=0)
    await append(run.store, RUN, letter(1, reason="out of memory", work=work))


def _group(number: int, media: ObjectRef) -> TrainGroup:
    stored = Trajectories(
        trajectory=examples.ref("trajectory"), conditions=examples.ref("conditions"), media=media,
        weights_digest=examples.digest(0),
    )  # fmt: skip
    scored = FragmentScored(
        fragment=Fragment(batch=0, group=number, first_sample=0, num_samples=4, attempt=number),
        policy=examples.policy(0), stored=stored, rewards=REWARDS[number], parts={},
        generated_by="rollout-0-a", worker="reward-0", seconds=1.0,
    )  # fmt: skip
    return TrainGroup(
        batch=0, group=number, attempt=0, policy=examples.policy(0), fragments=(scored,),
        advantages=(0.0,) * 4,
    )  # fmt: skip
