"""The record of a batch has the hours of all devices so far, each GPU counted once."""

from pathlib import Path

from services.scheduler.core.throughput import BatchForecast
from services.scheduler.shell.committed_views import device_hours
from services.scheduler.shell.metrics import batch_usage
from shared.messages.workers import Device
from shared.run.layout import usage_key
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples

H100 = Device(kind="H100", gpu="0", memory_bytes=1)
WORKERS = (
    examples.status("rollout", worker="rollout-0", host="a", device=H100),
    examples.status("reward", worker="reward-0", host="a", device=H100),
    examples.status("reward", worker="reward-1", host="a"),
    examples.status("reward", worker="reward-2", host="b"),
)


async def test_a_gpu_and_a_host_without_one_are_devices(tmp_path: Path) -> None:
    store, record = ObjectStore(FolderBackend(tmp_path)), examples.record(1)
    assert await device_hours(store, "demo", 0) == 0.0
    usage = batch_usage(record, 1800.0, {}, None, BatchForecast(), WORKERS, 0.5)
    await store.create(usage_key("demo", 0), usage.model_dump_json().encode())

    assert usage.machines["rollout-0"] == "H100 0 on a"
    assert await device_hours(store, "demo", 1) == 1.5
    assert await device_hours(store, "demo", 2) == 1.5, "batch 1 is not recorded"
