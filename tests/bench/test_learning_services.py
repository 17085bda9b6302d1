"""What is added up of a run's messages, and what two recipes are compared by."""

import json
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from bench.learning.services import Heard, compared
from shared.messages.codec import encode
from shared.messages.contracts import Message
from shared.messages.fluid import Piece, PieceTrained
from tests import examples


def heard(message: Message) -> Any:
    return Msg(_client=None, data=encode(message))


async def test_device_seconds_are_those_of_the_batches_before_a_version() -> None:
    found = Heard()
    for batch in range(3):
        trained = PieceTrained(
            batch=batch, attempt=0, update=0, sum_number=0, worker="t-0", seconds=2.0,
            pass_rows=0,
            piece=Piece(
                group=0, attempt=0, number=0, first_sample=0, num_samples=1, first_step=0,
                num_steps=1,
            ),
        )  # fmt: skip
        await found.receive(heard(trained))
        await found.receive(heard(examples.published(batch + 1, worker="t-0", seconds=0.5)))
    await found.receive(Msg(_client=None, data=b"the broker's own"))
    assert found.until(0) == {}
    assert found.until(2) == {"committing": 1.0, "training": 4.0}


def test_two_recipes_are_compared_by_medians_of_seeds(tmp_path: Path) -> None:
    for name, cost in (("old", 10.0), ("new", 1.5)):
        for seed in range(3):
            judged = [
                {
                    "version": version, "height": height, "seconds": {"generating": spent},
                    "nn": 2.5, "div": 3.0, "worst": 0.8, "gold": height, "svm": height,
                }
                for version, height, spent in ((0, 0.5, 0.0), (2, 0.95, cost + seed))
            ]  # fmt: skip
            result = {"recipe": name, "seed": seed, "command_seconds": cost, "evaluations": judged}
            (tmp_path / f"{name}.{seed}.json").write_text(json.dumps(result))
    found = compared(tmp_path, "old", "new")
    assert found["device_seconds"] == {"old": 11.0, "new": 2.5}
    assert found["ratio"] == pytest.approx(2.5 / 11)
    assert found["guards_hold"] == {"old": True, "new": True}
