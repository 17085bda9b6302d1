"""What is stored of a generated fragment beside what its message names."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import safetensors.numpy

from shared.devices.protocols import GeneratedFragment, GeneratingDevice
from shared.devices.publisher import FragmentPublisher
from shared.messages.contracts import Fragment
from shared.process.worker import WorkerContext
from shared.run.previews import PreviewRule, preview_key
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from shared.store.previews import unpack_previews
from tests import examples
from tests.scheduler.shell.served import Outbox

MEDIA = safetensors.numpy.save({"images": np.zeros((2, 1, 8, 8), np.uint8)})


class Device:
    async def conditions(
        self, text: str, source: bytes | None, negative: str | None = None
    ) -> bytes:
        return text.encode()


async def test_previews_are_kept_of_chosen_groups_and_are_no_reason_to_fail(tmp_path: Path) -> None:
    store, bus = ObjectStore(FolderBackend(tmp_path)), Outbox()
    worker = SimpleNamespace(
        name="rollout-0", address="rollout-0-a", num_done=0, note_shortage=lambda _: None
    )
    publisher = FragmentPublisher(
        cast(GeneratingDevice, Device()),
        cast(WorkerContext, SimpleNamespace(bus=bus, store=store, worker=worker)),
        lossless=True, previews=PreviewRule(frozenset({3}), groups=1),
    )  # fmt: skip
    for batch, group, media in ((3, 0, MEDIA), (3, 1, MEDIA), (4, 0, MEDIA)):
        await publish(publisher, batch, group, media)
    assert await store.keys("test/previews") == [preview_key("test", 3, 0, 2, 1)]
    stored = await store.read(preview_key("test", 3, 0, 2, 1))
    assert stored is not None and len(unpack_previews(stored)) == 2
    (tmp_path / "test" / "previews").rename(tmp_path / "old")
    (tmp_path / "test" / "previews").write_text("a file where the folder was")
    await publish(publisher, 3, 0, MEDIA)
    assert len(bus.published) == 4, "all were generated"


async def publish(publisher: FragmentPublisher, batch: int, group: int, media: bytes) -> None:
    fragment = Fragment(batch=batch, group=group, first_sample=2, num_samples=2, attempt=1)
    task = examples.task(fragment=fragment)
    await publisher.publish(task, GeneratedFragment(b"trajectory", media, examples.digest(0), 0.5))
