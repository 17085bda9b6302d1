"""What a model needs is known before it is loaded."""

from pathlib import Path

import pytest
from safetensors import safe_open

from shared.contracts import Device
from shared.errors import UserError
from shared.model_memory import weight_bytes

DIGITS = Path(__file__).parents[2] / "models" / "digits"


def test_every_weight_counts_at_the_type_it_is_held_in() -> None:
    elements = 0
    for file in DIGITS.rglob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            elements += sum(tensors.get_tensor(name).size for name in tensors.keys())  # noqa: SIM118
    assert weight_bytes(DIGITS, "float32") == 4 * elements
    assert weight_bytes(DIGITS, "bfloat16") == 2 * elements


def test_a_file_that_holds_no_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(UserError, match=r"model\.safetensors is not a safetensors file"):
        weight_bytes(tmp_path, "float32")


def test_a_device_that_is_too_small_is_refused_with_the_figures() -> None:
    assert Device(memory_bytes=10, needs_bytes=10).refusal is None
    small = Device(kind="RTX 4090", memory_bytes=24 * 2**30, needs_bytes=41 * 2**30)
    assert small.refusal == "the model needs 41.00 GiB, this RTX 4090 has 24.00 GiB"
