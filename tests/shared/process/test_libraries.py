"""A run records the libraries of each of its processes, however many there are."""

import pytest

from shared.process import libraries
from shared.process.libraries import record_versions, recorded_versions
from shared.run.layout import file_key
from shared.store import ObjectStore


async def test_each_version_that_a_service_has_had_is_recorded_once(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await folder_store.write(file_key("run", "model.folder"), b"a digest")
    for torch in ("2.10.0", "2.9.1", "2.10.0"):
        monkeypatch.setattr(libraries, "versions", lambda torch=torch: {"torch": torch})
        await record_versions(folder_store, "run", "rollout")
    await record_versions(folder_store, "run", "trainer")
    assert await recorded_versions(folder_store, "run") == {
        "torch of rollout": "2.10.0, 2.9.1", "torch of trainer": "2.10.0",
    }  # fmt: skip
    assert len(await folder_store.keys("run/files")) == 4
    assert await recorded_versions(folder_store, "another") == {}


async def test_a_damaged_record_counts_as_absent(folder_store: ObjectStore) -> None:
    await folder_store.write(file_key("run", "libraries.rollout.aa"), b"{}")
    assert await recorded_versions(folder_store, "run") == {}
