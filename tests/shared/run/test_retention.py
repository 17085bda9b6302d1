"""What is deleted of old versions, over random histories of runs."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.contracts import ObjectRef, Policy
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import CommitRecord, Retention, deletable, stored_bytes
from shared.run.layout import checkpoints_folder, weights_folder
from tests import examples
from tests.paths import DIGITS

RUN = "test"


def record(version: int, content: int) -> CommitRecord:
    """Versions of the same content have the same weights, as after a step that was skipped."""

    def ref(folder: str) -> ObjectRef:
        return ObjectRef(key=f"{folder}/{content:08d}", sha256=examples.digest(content), size=1)

    return CommitRecord(
        run=RUN,
        policy=Policy(version=version, weights_digest=examples.digest(content)),
        parent=None,
        weights=ref(weights_folder(RUN)),
        checkpoint=ref(checkpoints_folder(RUN)),
        worker="trainer-0",
    )


@dataclass
class History:
    """A run, and everybody who reads what it has stored."""

    retention: Retention
    chain: list[CommitRecord] = field(default_factory=list)
    there: set[str] = field(default_factory=set)
    in_use: dict[str, int] = field(default_factory=dict)
    measured: set[int] = field(default_factory=set)

    @property
    def newest(self) -> int:
        return len(self.chain) - 1

    def commit(self, *, changed: bool) -> None:
        content = self.newest + 1 if changed or not self.chain else int(self._weights(-1)[-8:])
        made = record(self.newest + 1, content)
        self.there |= {made.weights.key, made.checkpoint.key}
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

    def look(self) -> None:
        kept = self.retention.kept(self.newest, in_use=self.in_use.values(), measured=self.measured)
        deleted = deletable(self.chain, kept) & self.there
        self.there -= deleted
        assert len({self._weights(each) for each in kept} & self.there) == len(
            {self._weights(each) for each in kept}
        )
        for version in (0, self.newest, *self.in_use.values()):  # report, trainer, workers
            self.must_have(version)
        for back in range(min(self.retention.keep_last, self.newest + 1)):
            self.must_have(self.newest - back)

    def must_have(self, version: int) -> None:
        wanted = self.chain[version]
        assert {wanted.weights.key, wanted.checkpoint.key} <= self.there, version

    def _weights(self, version: int) -> str:
        return self.chain[version].weights.key


retentions = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 5),
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
    assert {int(key[-8:]) for key in history.there} == kept


def test_an_object_that_is_in_no_folder_of_the_run_is_never_deleted() -> None:
    forged = record(1, 1).model_copy(update={"weights": examples.ref("recipe.json")})
    assert deletable([record(0, 0), forged, record(2, 2)], {0, 2}) == {forged.checkpoint.key}


def recipe_of(changes: dict[str, int]) -> Recipe:
    return override(load_recipe(DIGITS), changes)


def test_the_disk_holds_what_is_kept_at_once() -> None:
    plain = {"run.steps": 100, "run.keep_last": 3}
    version = 3 * 1000  # weights and two moments
    assert stored_bytes(recipe_of(plain), 1000) == (3 + 1 + 1) * version
    assert stored_bytes(recipe_of(plain | {"run.keep_every": 50}), 1000) == (3 + 2 + 1) * version
    assert stored_bytes(recipe_of(plain | {"run.steps": 2}), 1000) == 3 * version
