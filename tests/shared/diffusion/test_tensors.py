import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.diffusion.sampling.sampler import Trajectory
from shared.diffusion.sampling.tensors import pack, pack_trajectory, unpack, unpack_trajectory
from shared.errors import ContractError


def trajectory(**changes: torch.Tensor) -> Trajectory:
    fields = {
        "latents": torch.randn(3, 5, 1, 2, 2),
        "log_probs": torch.randn(3, 4),
        "step_indices": torch.arange(4),
        "sigmas": torch.linspace(1, 0, 11),
    }
    return Trajectory(**{**fields, **changes})


def test_a_trajectory_survives_the_store_to_the_last_bit() -> None:
    given_one = trajectory()
    found = unpack_trajectory(pack_trajectory(given_one))
    for name in ("latents", "log_probs", "step_indices", "sigmas"):
        assert torch.equal(getattr(found, name), getattr(given_one, name))


@pytest.mark.parametrize(
    "changes",
    [
        {"latents": torch.randn(3, 4, 1, 2, 2)},
        {"log_probs": torch.randn(2, 4)},
        {"log_probs": torch.full((3, 4), float("nan"))},
        {"latents": torch.full((3, 5, 1, 2, 2), float("inf"))},
    ],
    ids=["states", "samples", "nan", "inf"],
)
def test_a_trajectory_that_does_not_fit_itself_is_refused(changes: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ContractError, match="not a trajectory"):
        unpack_trajectory(pack_trajectory(trajectory(**changes)))


def test_tensors_that_are_no_trajectory_are_refused() -> None:
    with pytest.raises(ContractError, match="not a trajectory"):
        unpack_trajectory(pack({"latents": torch.zeros(1)}))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_tensors_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        unpack(data)


def test_a_file_that_is_cut_off_is_refused() -> None:
    data = pack({"x": torch.zeros(100)})
    for length in (0, 7, 8, 40, len(data) - 1):
        with pytest.raises(ContractError):
            unpack(data[:length])


def test_a_header_of_too_many_tensors_is_refused_unread() -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(5000)}).encode()
    with pytest.raises(ContractError, match="4096"):
        unpack(len(header).to_bytes(8, "little") + header)
