"""Object keys and records in the store: a run made by an earlier release is read by the next."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.run import layout
from shared.run.commits import CommitRecord, record_digest
from shared.run.layout import commit_key
from shared.run.versions import Version

COMMIT = (Path(__file__).parent / "golden_commit.json").read_bytes().rstrip()
"""A commit record with every field set, as it stands in the store."""
DIGEST = "09ac5e845748dfd4b10501d5e0271121d25f8cd370473ef93b71300fd18644dc"


def test_objects_keep_their_keys() -> None:
    assert [
        layout.weights_folder("demo"),
        layout.checkpoints_folder("demo"),
        layout.conditions_folder("demo"),
        layout.batch_folder("demo", 12),
        layout.usage_key("demo", 12),
        layout.timeline_key("demo", 12),
        layout.evaluations_folder("demo"),
        layout.evaluation_interval_key("demo"),
        commit_key("demo", 12),
    ] == [
        "demo/weights",
        "demo/checkpoints",
        "demo/conditions",
        "demo/batches/00000012",
        "demo/usage/00000012.json",
        "demo/timeline/00000012.z",
        "demo/evaluations",
        "demo/evaluations/wanted.json",
        "demo/commits/00000012.json",
    ]


def test_a_commit_record_keeps_its_bytes_and_its_digest() -> None:
    record = CommitRecord.model_validate_json(COMMIT)
    assert record.encode() == COMMIT
    assert record_digest(record.encode()) == DIGEST


def test_trained_weights_stand_beside_those_that_sample() -> None:
    """They stand in two more fields; a record without them has the bytes above."""
    plain = json.loads(COMMIT)
    keys = list(plain)
    place = keys.index("weights") + 1
    both = {"trained_digest": "0" * 63 + "5", "trained_weights": plain["weights"]}
    items = [*plain.items()]
    wanted = dict([*items[:place], *both.items(), *items[place:]])
    text = json.dumps(wanted, indent=1)
    record = CommitRecord.model_validate_json(text)
    assert record.encode().decode() == text
    assert record.learned == (record.trained_weights, record.trained_digest)
    with pytest.raises(ValidationError, match="have a digest"):
        CommitRecord.model_validate_json(json.dumps(plain | {"trained_digest": "0" * 64}))


def test_an_entry_of_the_version_index_keeps_its_bytes() -> None:
    record = CommitRecord.model_validate_json(COMMIT)
    entry = Version(policy=record.policy, weights=record.weights).model_dump_json()
    plain = json.loads(COMMIT)
    expected = {"policy": plain["policy"], "weights": plain["weights"]}
    assert entry == json.dumps(expected, separators=(",", ":"))
