"""Versions that are due are evaluated as they are committed, each of them once."""

import asyncio
from statistics import fmean

import numpy as np
import pytest

from digenrl.evaluation.follower import Follower
from digenrl.evaluation.media import from_png
from digenrl.evaluation.progress import Progress
from digenrl.evaluation.records import EvaluationRecord, Evaluations
from digenrl.evaluation.run import RunEvaluator
from digenrl.report.stills import read_samples
from shared.errors import ContractError, ScoringError, UserError
from shared.recipe.recipe import Recipe
from shared.run.commits import read_commit
from shared.run.layout import evaluation_interval
from shared.store import ObjectStore
from tests.evaluation.runs import NUM_PROMPTS, begin, commit_up_to, recipe_with

OPPOSITES = {
    "reward__scorers": [{"name": "rough", "type": "jpeg-incompressibility"}],
    "evaluation__scorers": [{"name": "smooth", "type": "jpeg-compressibility"}],
}
"""What the gold reward likes is what the training reward does not."""


def follower(store: ObjectStore, recipe: Recipe) -> Follower:
    return Follower(store, recipe.run.name, Progress(), worker="evaluator-0")


def evaluations(store: ObjectStore, recipe: Recipe) -> Evaluations:
    return RunEvaluator(store, recipe, worker="a-reader").evaluations


async def stored(store: ObjectStore, recipe: Recipe) -> dict[str, bytes | None]:
    """Everything that was kept of evaluations, by key."""
    keys = await store.keys(f"{recipe.run.name}/evaluations")
    return {key: await store.read(key) for key in keys}


@pytest.mark.slow
async def test_due_versions_are_evaluated_as_they_are_committed(folder_store: ObjectStore) -> None:
    recipe = await begin(folder_store, evaluation__steps=12)
    await commit_up_to(folder_store, recipe, 3)
    evaluator = follower(folder_store, recipe)
    await evaluator.catch_up()
    kept = evaluations(folder_store, recipe)
    assert await kept.versions() == [0, 2]
    first = await stored(folder_store, recipe)

    await commit_up_to(folder_store, recipe, 5)
    await evaluator.catch_up()
    assert await kept.versions() == [0, 2, 4, 5]
    async with asyncio.timeout(20):  # as after a restart, and it ends with its run
        await follower(folder_store, recipe).follow(stay=False)
    now = await stored(folder_store, recipe)
    assert {key: now[key] for key in first} == first, "what was measured stays as it was"

    records = await kept.read_all()
    await check_media(folder_store, recipe, records)
    named = {sample.still.key for record in records for sample in record.samples}
    assert {key for key in now if key.endswith(".png")} == named, "nothing is kept twice"


async def check_media(store: ObjectStore, recipe: Recipe, records: list[EvaluationRecord]) -> None:
    """Every version has pictures of the same prompts, and figures of them."""
    sides = [await read_samples(store, record) for record in records]
    for record, side in zip(records, sides, strict=True):
        assert side.stills.shape == (2 * NUM_PROMPTS, 1, 8, 8)
        assert side.prompts == sides[0].prompts and len(set(side.prompts)) == NUM_PROMPTS
        assert side.right is not None
        assert record.quality.gold_accuracy == pytest.approx(side.right.mean())
        assert record.quality.num_samples == 2 * NUM_PROMPTS
        for name, mean in {
            "proxy": record.quality.rewards["proxy"],
            "reward": record.quality.reward,
        }.items():
            assert fmean(each.scores[name] or 0.0 for each in record.samples) == pytest.approx(mean)
        commit = await read_commit(store, recipe.run.name, record.version)
        assert commit is not None and record.policy == commit.policy
    assert len({record.quality.reward for record in records}) == len(records)
    assert (sides[0].stills != sides[1].stills).any()
    png = await store.get(records[0].samples[3].media)
    assert (from_png(png) == sides[0].stills[3]).all()


@pytest.mark.slow
async def test_a_due_version_that_was_not_kept_is_left_out(folder_store: ObjectStore) -> None:
    recipe = await begin(folder_store)
    await commit_up_to(folder_store, recipe, 4)
    progress = Progress()
    evaluator = Follower(folder_store, recipe.run.name, progress, worker="evaluator-0", every=1)
    for version in (1, 2, 3):
        gone = await read_commit(folder_store, recipe.run.name, version)
        assert gone is not None
        await folder_store.delete([gone.weights.key])
    await evaluator.catch_up()
    assert await evaluations(folder_store, recipe).versions() == [0, 4]
    assert progress.pending == [5], "it is not committed yet"
    assert await evaluation_interval(folder_store, recipe.run.name) == 1


@pytest.mark.slow
async def test_two_evaluators_leave_one_record_of_a_version(folder_store: ObjectStore) -> None:
    recipe = await begin(folder_store)
    await commit_up_to(folder_store, recipe, 0)
    commit = await read_commit(folder_store, recipe.run.name, 0)
    assert commit is not None
    one, other = (RunEvaluator(folder_store, recipe, worker=name) for name in ("one", "other"))
    slow = await other._evaluate(commit)  # has not seen that there is a record by now
    first = await one.record_of(commit)
    assert not await other.evaluations.add(slow)
    assert await other.record_of(commit) == first
    assert first.worker == "one" and slow.quality == first.quality


@pytest.mark.slow
async def test_evaluation_settings_change_what_is_sampled_and_are_kept_apart(
    folder_store: ObjectStore,
) -> None:
    recipe = await begin(folder_store, evaluation__seed=1)
    await commit_up_to(folder_store, recipe, 0)
    evaluator = follower(folder_store, recipe)
    await evaluator.catch_up()
    more = await begin(folder_store, evaluation__seed=1, evaluation__steps=3)
    await evaluator.catch_up()  # it reads the recipe of a resumed run
    [coarse], [fine] = [await evaluations(folder_store, each).read_all() for each in (more, recipe)]
    assert coarse.settings != fine.settings
    one, other = [await read_samples(folder_store, record) for record in (coarse, fine)]
    assert (one.stills != other.stills).mean() > 0.05


@pytest.mark.slow
async def test_the_alarm_is_in_the_record_of_the_version_that_raised_it(
    folder_store: ObjectStore,
) -> None:
    recipe = await begin(folder_store, run__steps=3, evaluation__every=1, **OPPOSITES)
    await commit_up_to(folder_store, recipe, 3)
    evaluator = follower(folder_store, recipe)
    await evaluator.catch_up()
    first, *later = await evaluations(folder_store, recipe).read_all()
    assert first.alarms == ()
    risen = [record.quality.reward > first.quality.reward for record in later]
    assert any(risen), "noise in the weights is rough"
    for record, has_risen in zip(later, risen, strict=True):
        assert bool(record.alarms) == has_risen
    assert all("gold reward smooth fell" in record.alarms[0] for record in later if record.alarms)


@pytest.mark.slow
async def test_a_scorer_that_fails_leaves_no_record(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_PRIVATE_HOSTS", "127.0.0.1")
    nobody = {"name": "taste", "type": "remote", "url": "http://127.0.0.1:9", "patience": 0.1}
    recipe = await begin(folder_store, evaluation__scorers=[nobody])
    await commit_up_to(folder_store, recipe, 0)
    with pytest.raises(ScoringError, match="taste"):
        await follower(folder_store, recipe).catch_up()
    assert await evaluations(folder_store, recipe).versions() == []


async def test_a_recipe_that_does_not_say_how_often_is_told_how(folder_store: ObjectStore) -> None:
    recipe = recipe_with({}).model_copy(
        update={"evaluation": recipe_with({}).evaluation.model_copy(update={"every": None})}
    )
    await folder_store.write(f"{recipe.run.name}/recipe.json", recipe.model_dump_json().encode())
    with pytest.raises(UserError, match=r"--every: .*evaluation\.every"):
        await follower(folder_store, recipe).catch_up()
    given = Follower(folder_store, recipe.run.name, Progress(), worker="a", every=5)
    await given.catch_up()
    assert await evaluations(folder_store, recipe).versions() == [], "nothing is committed"


async def test_what_is_no_record_is_refused(folder_store: ObjectStore) -> None:
    recipe = await begin(folder_store)
    kept = evaluations(folder_store, recipe)
    folder = f"{recipe.run.name}/evaluations/{kept.settings[:16]}/records"
    await folder_store.write(f"{folder}/00000002.json", b"{}")
    with pytest.raises(ContractError, match="00000002"):
        await kept.read(2)
    assert await kept.read(0) is None


def test_a_picture_is_kept_to_the_last_bit() -> None:
    from digenrl.evaluation.media import as_png

    rng = np.random.default_rng(0)
    for channels in (1, 3):
        image = rng.integers(0, 256, (channels, 5, 7), dtype=np.uint8)
        assert (from_png(as_png(image)) == image).all()
