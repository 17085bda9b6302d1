"""What is deleted of old versions, over random histories of runs."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import CommitRecord
from shared.run.layout import KEPT_BATCHES, checkpoints_folder, weights_folder
from shared.run.manifest import MANIFEST
from shared.run.retention import (
    Retention,
    deletable,
    named_by,
    retention_from,
    stored_bytes,
    trajectory_bytes,
)
from tests import examples
from tests.paths import DIGITS

RUN = "test"


def record(version: int, content: int) -> CommitRecord:
    """Versions of the same content have the same weights, as after a step that was skipped."""

    def ref(folder: str) -> ObjectRef:
        key = f"{folder}/{content:08d}{MANIFEST}"
        return ObjectRef(key=key, sha256=examples.digest(content), size=1)

    return examples.record(
        version, policy=examples.policy(version, content), weights=ref(weights_folder(RUN)),
        checkpoint=ref(checkpoints_folder(RUN)),
    )  # fmt: skip


def shards_of(record: CommitRecord) -> dict[str, list[str]]:
    """Two of each object's shards are also those of the version before, or after."""
    content = int(record.weights.key.removesuffix(MANIFEST)[-8:])
    names = [content, f"{content // 2}-even", f"{(content + 1) // 2}-odd"]
    keys = (record.weights.key, record.checkpoint.key)
    return {key: [f"{key.rsplit('/', 1)[0]}/{name}" for name in names] for key in keys}


@dataclass
class History:
    """A run, and everybody who reads what it has stored."""

    retention: Retention
    chain: list[CommitRecord] = field(default_factory=list)
    there: set[str] = field(default_factory=set)
    in_use: dict[str, int] = field(default_factory=dict)
    measured: set[int] = field(default_factory=set)
    gold: dict[int, float] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return len(self.chain) - 1

    def commit(self, *, changed: bool) -> None:
        content = self.newest + 1 if changed or not self.chain else self.content(-1)
        made = record(self.newest + 1, content)
        self.shards |= shards_of(made)
        self.there |= named_by([made], self.shards)
        self.chain.append(made)

    def adopt(self, worker: str, back: int) -> None:
        back = min(back, self.retention.max_staleness, self.newest)
        self.in_use[worker] = max(self.in_use.get(worker, 0), self.newest - back)
        self.must_have(self.in_use[worker])

    def evaluate(self) -> None:
        every = self.retention.evaluate_every
        due = [] if every is None else list(range(0, self.newest + 1, every))
        for version in [each for each in due if each not in self.measured][:1]:
            self.must_have(version)
            self.measured.add(version)
            self.gold[version] = float(version * 7 % 5)

    def look(self) -> None:
        kept = self.retention.kept(
            self.newest, in_use=self.in_use.values(), measured=self.measured, gold=[self.gold]
        )
        shards, naming = deletable(self.chain, kept, self.shards)
        assert not any(key.endswith(MANIFEST) for key in shards)
        self.there -= shards | naming
        assert self.there == named_by((self.chain[each] for each in kept), self.shards)
        for version in (0, self.newest, *self.in_use.values()):  # report, trainer, workers
            self.must_have(version)
        for back in range(min(self.retention.keep_last, self.newest + 1)):
            self.must_have(self.newest - back)

    def must_have(self, version: int) -> None:
        wanted = self.chain[version]
        assert named_by([wanted], self.shards) <= self.there, version

    def content(self, version: int) -> int:
        return int(self.chain[version].weights.key.removesuffix(MANIFEST)[-8:])


retentions = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 5),
    keep_best=st.none() | st.integers(1, 3),
    max_staleness=st.integers(0, 1),
    evaluate_every=st.none() | st.integers(1, 5),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.booleans()),
        st.tuples(st.sampled_from(["rollout-0", "rollout-1"]), st.integers(0, 1)),
        st.tuples(st.just("evaluate"), st.just(0)),
        st.tuples(st.just("look"), st.just(0)),
        st.tuples(st.just("leave"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(retentions, events)
def test_nothing_that_somebody_needs_is_deleted(
    retention: Retention, happens: list[tuple[str, int]]
) -> None:
    history = History(retention)
    history.commit(changed=True)
    for what, how in happens:
        match what:
            case "commit":
                history.commit(changed=bool(how))
            case "evaluate":
                history.evaluate()
            case "look":
                history.look()
            case "leave":
                history.in_use.clear()
            case worker:
                history.adopt(worker, how)


def test_what_is_left_does_not_grow_with_the_number_of_steps() -> None:
    history = History(Retention(keep_last=2, keep_every=40, evaluate_every=10))
    for step in range(200):
        history.commit(changed=True)
        if step % 10 == 0:
            history.evaluate()
        history.look()
    kept = {0, 40, 80, 120, 160, 198, 199}
    named = [key for key in history.there if key.endswith(MANIFEST)]
    assert {int(key.removesuffix(MANIFEST)[-8:]) for key in named} == kept
    assert len(history.there) <= 2 * 4 * len(kept)


def test_the_best_versions_stay_and_of_equal_ones_the_older() -> None:
    gold = {0: 0.1, 5: 0.9, 10: 0.4, 15: 0.9, 20: 0.3}
    best = Retention(keep_last=1, keep_best=2)
    assert best.kept(100, gold=[gold]) == {0, 5, 15, 100}
    assert Retention(keep_last=1, keep_best=1).kept(100, gold=[gold]) == {0, 5, 100}
    assert best.kept(100, gold=[{5: 0.9}, {7: 0.2, 9: 0.1, 11: 0.3}]) == {0, 5, 7, 11, 100}
    assert Retention(keep_last=1).kept(100, gold=[gold]) == {0, 100}


def test_the_best_version_of_a_run_that_is_evaluated_is_kept() -> None:
    evaluated = {"evaluation.every": 5}
    assert retention_from(recipe_of({})).keep_best is None
    assert retention_from(recipe_of(evaluated)).keep_best == 1
    assert retention_from(recipe_of(evaluated | {"run.keep_best": 0})).keep_best == 0
    assert Retention(keep_last=1, keep_best=0).kept(9, gold=[{5: 0.9}]) == {0, 9}


def test_a_run_one_step_stale_keeps_the_version_before_the_newest() -> None:
    """Tasks of the open batch may still name that version: its weights must be there."""
    stale = retention_from(recipe_of({"schedule.max_staleness": 1, "run.keep_last": 1}))
    assert stale.kept(7) == {0, 6, 7}
    fresh = retention_from(recipe_of({"schedule.max_staleness": 0, "run.keep_last": 1}))
    assert fresh.kept(7) == {0, 7}


def test_an_object_that_is_in_no_folder_of_the_run_is_never_deleted() -> None:
    forged = record(1, 1).model_copy(update={"weights": examples.ref("recipe.json")})
    found = deletable([record(0, 0), forged, record(2, 2)], {0, 2}, {})
    assert found == (set(), {forged.checkpoint.key})


def recipe_of(changes: dict[str, Any]) -> Recipe:
    return override(load_recipe(DIGITS), changes)


def test_the_disk_holds_what_is_kept_at_once() -> None:
    plain = {"run.steps": 100, "run.keep_last": 3}
    version = 3 * 1000  # weights and two moments
    assert stored_bytes(recipe_of(plain), 1000) == (3 + 1 + 1) * version
    assert stored_bytes(recipe_of(plain | {"run.keep_every": 50}), 1000) == (3 + 2 + 1) * version
    assert stored_bytes(recipe_of(plain | {"run.steps": 2}), 1000) == 3 * version
    all_weights = {"model.trained": "full", "model.dtype": "bfloat16", "algorithm.kl_beta": 0.0}
    # Weights as they are published, and beside them masters and two moments: 14 bytes each.
    assert stored_bytes(recipe_of(plain | all_weights), 1000) == 5 * 14 * 250


def test_trajectories_of_the_newest_batches_are_kept() -> None:
    plain = recipe_of({"run.steps": 100})
    states = plain.sampling.window + 1
    batch = plain.batch.groups * plain.batch.group_size * states * 4 * 16 * 8 * 8
    assert trajectory_bytes(plain, (16, 8, 8)) == (KEPT_BATCHES + 2) * batch
