"""The tests of the bus, of its register and streams and of roles' rights hold on the NATS server in
memory: they are written for the real one."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.brokers.embedded import plan_brokers
from digenrl.local.secrets.keys import load_keys
from tests.brokers import PASSWORD
from tests.shared.bus import test_bus, test_register, test_rights, test_stream_sizes
from tests.world.nats_transport import Network, installed
from tests.world.test_nats_conformance import in_memory

pytestmark = pytest.mark.slow
EXISTING = [
    test
    for module in (test_bus, test_register, test_stream_sizes, test_rights)
    for name, test in vars(module).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(test)
    and name != "test_nobody_answering_is_an_error_that_says_so"
]  # fmt: skip


@pytest.mark.parametrize("test", EXISTING, ids=lambda each: each.__name__)
async def test_the_tests_of_the_bus_hold_in_memory(
    test: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = inspect.signature(test).parameters
    keys = load_keys(tmp_path)
    brokers = plan_brokers(tmp_path, keys if "planned" in wanted else PASSWORD)
    server, loop = in_memory(brokers, network := Network()), asyncio.get_running_loop()

    class Process:
        kill, wait = server.kill, staticmethod(lambda: None)

    def start(_: Any) -> type[Process]:
        loop.call_soon_threadsafe(server.start)
        return Process

    if "start" not in wanted:
        server.start()
    given = {
        "nats_url": brokers.environment.get("DIGENRL_NATS_URL"), "brokers": brokers,
        "planned": brokers, "keys": keys, "start": start, "monkeypatch": monkeypatch,
    }  # fmt: skip
    for exists in (False, True) if "exists" in wanted else (False,):
        with installed(network):
            await test(**{name: (given | {"exists": exists})[name] for name in wanted})
