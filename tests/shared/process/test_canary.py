"""Kinds of devices are compared when they join: the first measures, and a difference is said."""

import pytest

from shared.process import canary
from shared.process.canary import told_apart
from shared.run.layout import file_key
from shared.store import ObjectStore

VERSIONS = {"torch": "2.10.0", "numpy": "2.1"}


class Device:
    """A device that makes these numbers, and counts how often it is asked."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.asked = numbers, 0

    async def measure(self) -> tuple[float, ...]:
        self.asked += 1
        return self.numbers


async def test_a_kind_that_makes_other_numbers_says_by_how_much(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "versions", lambda: VERSIONS)
    first, same, other = Device(1.0, 0.5), Device(1.0, 0.5), Device(1.0, 0.498)
    assert await told_apart(folder_store, "run", "H100", first.measure) == ""
    assert await told_apart(folder_store, "run", "H100", same.measure) == ""
    assert (first.asked, same.asked) == (1, 0)
    note = await told_apart(folder_store, "run", "A100", other.measure)
    assert note.startswith("its numbers differ from those of H100 by 0.002 of the largest one")
    monkeypatch.setattr(canary, "versions", lambda: {**VERSIONS, "torch": "2.9.1"})
    note = await told_apart(folder_store, "run", "H100", Device(1.0, 0.49).measure)
    assert note.startswith("its numbers differ from those of H100 with torch 2.10.0 by 0.01 of")
    assert await told_apart(folder_store, "another", "A100", other.measure) == ""


async def test_kinds_with_the_same_numbers_say_nothing(folder_store: ObjectStore) -> None:
    for device in ("A100 40GB", "A100 80GB"):
        assert await told_apart(folder_store, "run", device, Device(1.0).measure) == ""


async def test_a_damaged_record_counts_as_absent_and_is_made_again(
    folder_store: ObjectStore,
) -> None:
    first, again = Device(1.0), Device(1.0)
    await told_apart(folder_store, "run", "H100", first.measure)
    [key] = await folder_store.keys("run/files")
    await folder_store.delete_folder("run/copies")
    await folder_store.write(key, b"{}")
    await folder_store.write(file_key("run", "canary.aa"), b"\xff")
    assert await told_apart(folder_store, "run", "H100", again.measure) == ""
    assert again.asked == 1
    assert "differ" in await told_apart(folder_store, "run", "A100", Device(0.5).measure)
    assert again.asked == 1
