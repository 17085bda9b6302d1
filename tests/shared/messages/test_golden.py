"""The wire: services of different releases, and the streams of a run that is resumed, share it."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest

from shared.messages import subjects
from shared.messages.codec import decode, encode
from shared.messages.contracts import Message
from shared.messages.fluid import FluidEvent, FluidMessage, Stepped

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
"""One message of every kind with every field set, by its subject; and the streams."""
MESSAGES: dict[str, dict[str, Any]] = GOLDEN["messages"]


@pytest.mark.parametrize("subject", MESSAGES)
def test_a_message_keeps_its_bytes_and_its_subject(subject: str) -> None:
    data = msgpack.packb(MESSAGES[subject])
    message = decode(data)
    assert encode(message) == data
    assert subjects.message_subject("demo", message) == subject


def test_every_kind_of_message_is_here() -> None:
    union, _ = get_args(Message)
    kinds = {kind.model_fields["kind"].default for kind in get_args(union)}
    assert kinds == {message["kind"] for message in MESSAGES.values()}


def test_streams_keep_their_subjects() -> None:
    assert GOLDEN["streams"] == {
        stream.name: {
            "subjects": list(stream.subjects),
            "slots": stream.slots,
            "newest": stream.newest,
        }
        for stream in subjects.STREAMS
    }


def test_readers_keep_their_subjects() -> None:
    assert [
        subjects.tasks_for("demo", "rollout-0-a"),
        subjects.refusals_for("demo", "rollout-0-a"),
        subjects.device_subject("demo", "trainer-0-a"),
        subjects.event_subject("demo", "policy_published"),
        subjects.batch_subject("demo", subjects.TASK, 3),
        subjects.batch_subject("demo", subjects.TRAJ, 3),
        *subjects.run_subjects("demo", subjects.DLQ),
    ] == [
        "dg.demo.task.rollout-0-a.>",
        "dg.demo.refused.rollout-0-a",
        "dg.demo.device.trainer-0-a",
        "dg.demo.evt.policy_published",
        "dg.demo.task.*.3.>",
        "dg.demo.traj.*.3.>",
        "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.*.*",
        "dg.demo.quarantine.>",
    ]


def test_the_scheduler_follows_what_fluid_devices_report_and_not_its_own_commands() -> None:
    wanted = [f.replace("*", "[^.]+").replace(">", ".+") for f in subjects.fluid_events("demo")]
    messages = [decode(msgpack.packb(stored)) for stored in MESSAGES.values()]
    messages += [
        message.model_copy(update={"is_reference": False})
        for message in messages
        if isinstance(message, Stepped)
    ]
    for message in messages:
        if isinstance(message, FluidMessage):
            subject = subjects.message_subject("demo", message)
            is_followed = any(re.fullmatch(each, subject) for each in wanted)
            assert is_followed == isinstance(message, FluidEvent)
