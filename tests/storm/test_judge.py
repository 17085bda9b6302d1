"""The judge of the storm, on records in which something is planted."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench.cluster.build import Emulation
from bench.cluster.setting import recipe_of, write_prompts
from shared.messages.contracts import ObjectRef, Policy
from shared.run.commits import CommitRecord, TrainedGroup, record_digest
from shared.store import ObjectStore
from tests import examples
from tests.profile.tiny import GROUP_SIZE, GROUPS
from tests.storm.judge import Rules, judge, judge_objects
from tests.storm.reference import Expected, Reference
from tests.storm.small import small

RULES = Rules(GROUPS, GROUP_SIZE)
REF = ObjectRef(key="small/weights/0", sha256="0" * 64, size=1)
VERSIONS = 5
Change = Callable[[CommitRecord], dict[str, object]]


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    setting = small(tmp_path)
    write_prompts(tmp_path, 16)
    return Reference(Emulation.of(setting), recipe_of(setting, tmp_path))


def chain(reference: Reference, planted: Change | None = None, at: int = 2) -> list[CommitRecord]:
    """The records of an undisturbed run, with a change to one that its child takes into account."""
    records = [record_of(Expected(reference.first(), reference.first(), ()), [])]
    while len(records) < VERSIONS:
        groups = [trained_group(len(records) - 1, group, ()) for group in range(GROUPS)]
        records.append(record_of(reference.next(records, groups), records))
    if planted is not None:
        records[at] = records[at].model_copy(update=planted(records[at]))
        for number in range(at + 1, VERSIONS):
            parent = record_digest(records[number - 1].encode())
            records[number] = records[number].model_copy(update={"parent": parent})
    return records


def record_of(expected: Expected, before: Sequence[CommitRecord]) -> CommitRecord:
    version = len(before)
    trained = tuple(
        trained_group(version - 1, group, rewards) for group, rewards in enumerate(expected.rewards)
    )
    return examples.record(
        version, before[-1] if before else None, run="small", weights=REF, checkpoint=REF,
        policy=Policy(version=version, weights_digest=expected.weights_digest), trained=trained,
    )  # fmt: skip


def trained_group(batch: int, group: int, rewards: tuple[float, ...]) -> TrainedGroup:
    return examples.trained_group(
        group, batch, rewards, fragments=((0, 2, 0), (2, 2, 1)), workers=("a", "b")
    )


def with_group(**changes: object) -> Change:
    def change(record: CommitRecord) -> dict[str, object]:
        first = record.trained[0].model_copy(update=changes)
        return {"trained": (first, *record.trained[1:])}

    return change


PLANTED: dict[str, Change] = {
    "group 1 is trained 2 times": lambda r: {"trained": (*r.trained, r.trained[1])},
    "group 3 is trained 0 times": lambda r: {"trained": r.trained[:-1]},
    "group 0 is made of the samples [0, 1]": with_group(fragments=((0, 2, 0),)),
    "group 0 is made of the samples [0, 0, 1, 1, 2, 3]": with_group(
        fragments=((0, 2, 0), (0, 2, 1), (2, 2, 0))
    ),
    "does not name the record before it": lambda r: {"parent": "0" * 64},
    "group 0 has a staleness of 1": with_group(policy_version=0),
    "group 0 has the rewards": with_group(rewards=(0.5, None, 0.5, 0.5)),
    "other weights generate": lambda r: {"policy": Policy(version=2, weights_digest="0" * 64)},
    "other rewards than": with_group(rewards=(0.25, 0.5, 0.25, 0.5)),
    "is in the place of 2": lambda r: {"policy": r.policy.model_copy(update={"version": 3})},
}


def found_in(records: Sequence[CommitRecord], reference: Reference) -> list[str]:
    return judge(records, RULES) or reference.compare(records)


def test_the_records_of_an_undisturbed_run_break_no_rule(reference: Reference) -> None:
    assert found_in(chain(reference), reference) == []


@pytest.mark.parametrize("fault", list(PLANTED))
def test_a_planted_violation_is_named(fault: str, reference: Reference) -> None:
    found = found_in(chain(reference, PLANTED[fault]), reference)
    assert any(fault in each for each in found), found


def test_one_step_of_staleness_is_within_a_bound_of_one(reference: Reference) -> None:
    records = chain(reference, with_group(policy_version=0))
    assert judge(records, Rules(GROUPS, GROUP_SIZE, max_staleness=1)) == []
    assert reference.compare(records), "another version makes other samples"


async def test_an_object_that_is_not_what_its_record_says_is_named(
    reference: Reference, folder_store: ObjectStore
) -> None:
    plain = chain(reference)
    digests = [record.policy.weights_digest for record in plain]
    refs = [
        await folder_store.put("small/weights", digest.encode() * 4, suffix=".bin")
        for digest in digests
    ]
    records = [
        record.model_copy(update={"weights": ref, "checkpoint": ref})
        for record, ref in zip(plain, refs, strict=True)
    ]
    assert await judge_objects(records, folder_store) == []
    swapped = [*records[:-1], records[-1].model_copy(update={"weights": refs[-2]})]
    [fault] = await judge_objects(swapped, folder_store)
    assert "of other weights than the record says" in fault
    await folder_store.delete_folder("small/weights")
    assert len(await judge_objects(records, folder_store)) == 2 * 3, "the newest three are missing"
