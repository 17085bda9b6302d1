"""What fluid devices do not do is refused with field and remedy; what they do fits a message."""

from typing import Any

import pytest

from shared.errors import ContractError, UserError
from shared.messages.codec import decode, encode
from shared.messages.contracts import Policy
from shared.messages.fluid import ExchangeSums, Piece, Share
from shared.recipe.fluid_devices import MAX_DEVICES
from shared.recipe.recipe import load_recipe, override
from tests.paths import ROOT

FLUID = load_recipe(ROOT / "recipes" / "digits-fluid.toml")


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.devices": MAX_DEVICES + 1},
        {"trainer.hosts": 2},
        {"trainer.sharded": True},
        {"schedule.max_staleness": "auto"},
        {"rollout.workers": 1, "rollout.can_train": True},
    ],
    ids=lambda changes: list(changes)[-1],
)
def test_what_they_do_not_do_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        override(FLUID, changes)
    said = str(refused.value)
    assert list(changes)[-1] in said and "set it to" in said and "\n" not in said
    assert 'or schedule.mode to "pipelined"' in said


def sums(devices: int, pieces: int) -> ExchangeSums:
    """Return what asks so many members for their sums, each with as many pieces."""
    names = [f"a-gpu-host-{number // 8:04d}-{number % 8}" for number in range(devices)]
    trained = [
        tuple(
            Piece(
                group=(number * pieces + each) // 4,
                attempt=0,
                number=each % 4,
                first_sample=6 * (each % 4),
                num_samples=6,
                first_step=0,
                num_steps=2,
            )
            for each in range(pieces)
        )
        for number in range(devices)
    ]
    return ExchangeSums(
        batch=10_000, attempt=0, round=1, committer=names[0], max_seconds=60.0,
        policy=Policy(version=10_000, weights_digest="0123456789abcdef" * 4),
        shares=tuple(
            Share(worker=name, sum_number=10_000, pieces=each)
            for name, each in zip(names, trained, strict=True)
        ),
    )  # fmt: skip


def test_as_many_as_there_may_be_fit_a_message_with_eight_pieces_each() -> None:
    assert override(FLUID, {"trainer.devices": MAX_DEVICES}).trainer.devices == MAX_DEVICES
    message = sums(MAX_DEVICES, 8)
    assert decode(encode(message)) == message
    with pytest.raises(ContractError):
        encode(sums(4 * MAX_DEVICES, 8))
