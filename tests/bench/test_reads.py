"""What the bench of readers computes, and that its reader reads."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.reads import PER_SECOND, Cost, Reads, read
from digenrl.local.processes.ports import free_ports


def test_cost_is_the_median_of_pairs_and_the_hundredth_slowest_answer() -> None:
    reads = Reads(seconds={"/v1/run": [number / 1000 for number in range(1, 1001)]})
    cost = Cost(
        read=[11.0, 10.1, 10.3], control=[10.0, 10.0, 10.0], reads=[reads], constants=[reads]
    )
    assert cost.shares == pytest.approx([0.1, 0.01, 0.03])
    assert cost.slowest == pytest.approx([0.991], abs=0.001)
    assert list(cost.slowest_paths) == ["/v1/run"]
    assert "+3.00% (median of 3 pairs, +1.00% to +10.00%)" in cost.line()


@pytest.mark.slow
async def test_reader_asks_at_its_rate_and_counts_what_is_no_success(tmp_path: Path) -> None:
    [port] = free_ports(1)
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.reads", "constants", str(port)
    )
    reads = Reads()
    try:
        async with httpx.AsyncClient() as client:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    await client.get(f"http://127.0.0.1:{port}/livez")
                    break
                await asyncio.sleep(0.05)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(read(port, "token", reads), 1.0)
        assert PER_SECOND // 2 <= len(reads.all) <= PER_SECOND + 1
        assert not reads.refused
    finally:
        server.kill()
        await server.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read(port, "token", reads), 0.2)
    assert reads.refused and all(name.endswith(" 0") for name in reads.refused)
