"""Weights that processes of a host map are read where they lie, and digested by one alone."""

import asyncio
import gc
import json
from mmap import ACCESS_COPY, mmap
from pathlib import Path

import pytest
import torch

from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.mapped import unpack_mapped
from shared.diffusion.weights.trained_weights import Staging, WeightsInUse, weights_digest
from shared.errors import ContractError
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from shared.telemetry import DIGESTED_BYTES
from tests.shared.diffusion.digits import adapter, load_digits
from tests.shared.store.hosts import Counting, counted, process_on

NAMED = {
    "a": torch.arange(15.0).view(5, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.zeros(0, 3),
    "e": torch.tensor([True, False]),
}


def mapped(folder: Path, data: bytes) -> mmap:
    path = folder / "object"
    path.write_bytes(data)
    with path.open("rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_COPY)


def test_mapped_tensors_are_those_of_the_object(tmp_path: Path) -> None:
    data = pack(NAMED)
    found, expected = unpack_mapped(mapped(tmp_path, data)), unpack(data)
    gc.collect()  # the mapping stays as long as its tensors
    assert {n: (t.dtype, t.tolist()) for n, t in found.items()} == {
        n: (t.dtype, t.tolist()) for n, t in expected.items()
    }


def test_a_header_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    data = pack({"a": NAMED["a"]})
    size = int.from_bytes(data[:8], "little")
    for offsets in ([0, 64], [4, 64], [-60, 0], [60, 0], [0, 60.0], [0], None, "0"):
        header = {"a": {"dtype": "F32", "shape": [5, 3], "data_offsets": offsets}}
        text = json.dumps(header).encode()
        wrong = len(text).to_bytes(8, "little") + text + data[8 + size :]
        with pytest.raises(ContractError):
            unpack_mapped(mapped(tmp_path, wrong))
    for wrong in (data[:-1], data[:12], b"\0" * 9):
        with pytest.raises(ContractError):
            unpack_mapped(mapped(tmp_path, wrong))


async def test_a_version_is_digested_once_by_whoever_stores_it_and_once_per_host(
    tmp_path: Path,
) -> None:
    policy, backend = load_digits(), Counting(tmp_path / "objects")
    data = adapter(policy, 1)
    digest = weights_digest(unpack(data))
    with counted(DIGESTED_BYTES, of="object") as by_the_committer:
        ref = await ObjectStore(backend).put("run/weights", data, suffix=".safetensors")
    hosts = [tmp_path / f"host-{number}" for number in range(2)]

    async def adopt(host: Path) -> str:
        store = ObjectStore(backend, cache=process_on(host))
        opened, staging = await open_tensors(store, ref, digest), Staging(policy.model.transformer)
        async for part in opened.parts():
            staging.add(part)
        return WeightsInUse(policy.model.transformer).adopt(staging.finish(opened.weights_digest))

    with (
        counted(DIGESTED_BYTES, of="object") as by_hosts,
        counted(DIGESTED_BYTES, of="weights") as of_weights,
    ):
        found = await asyncio.gather(*(adopt(host) for host in hosts * 4))
    assert set(found) == {digest}
    assert by_the_committer.value == len(data)
    assert by_hosts.value == backend.read_bytes == len(hosts) * len(data)
    assert of_weights.value == 0
    assert WeightsInUse(policy.model.transformer).digest() == digest
