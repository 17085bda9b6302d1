"""A port that was given out stays with its child, whoever else looks for one."""

import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from digenrl.local.brokers.embedded import GRPC_OFFSET, plan_brokers
from digenrl.local.processes import ports
from digenrl.local.processes.ports import free_ports, hold_port, releasing_ports
from shared.errors import UserError

CHOOSES = """
import sys
from digenrl.local.processes import ports
ports.FIRST_PORT, ports.LAST_PORT = int(sys.argv[1]), int(sys.argv[2])
print(*ports.free_ports(int(sys.argv[3])), flush=True)
sys.stdin.read()
"""
"""Another process that holds what it has chosen until it is told to end."""

SERVES = """
import sys, uvicorn
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"here"})
uvicorn.run(app, port=int(sys.argv[1]), lifespan="off", log_level="error")
"""


def few_ports(monkeypatch: pytest.MonkeyPatch, count: int) -> range:
    [first] = free_ports(1)
    few = range(first + 1, first + 1 + count)
    monkeypatch.setattr(ports, "FIRST_PORT", few.start)
    monkeypatch.setattr(ports, "LAST_PORT", few.stop)
    return few


def test_nothing_is_given_out_twice_partners_included() -> None:
    paired = free_ports(40, paired_at=GRPC_OFFSET)
    partners = [port + GRPC_OFFSET for port in paired]
    every = [*paired, *partners, *free_ports(40), *free_ports(40)]
    assert len(set(every)) == len(every)
    assert set(every) <= set(range(ports.FIRST_PORT, ports.LAST_PORT))


def test_a_port_that_was_asked_for_is_not_given_to_another_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = few_ports(monkeypatch, 12)
    assert hold_port(few[5])
    assert hold_port(few[5])  # by the same process, as often as it likes
    chosen = free_ports(6)
    assert few[5] not in chosen


@pytest.mark.skipif(sys.platform != "linux", reason="other processes see held ports on Linux")
def test_two_processes_share_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    few = few_ports(monkeypatch, 12)
    arguments = [sys.executable, "-c", CHOOSES, str(few.start), str(few.stop), "5"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = set(free_ports(5))
        other.stdin.close()
    assert len(theirs) == 5
    assert not theirs & ours


def test_a_child_listens_where_its_parent_holds_the_port_again_and_again() -> None:
    [port] = free_ports(1)
    with socket.socket() as caller:  # until then nobody is there, and the caller hears so at once
        assert caller.connect_ex(("127.0.0.1", port)) != 0
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", SERVES, str(port)]) as child:
            transport = httpx.HTTPTransport(retries=8)
            with httpx.Client(transport=transport) as client:
                assert client.get(f"http://127.0.0.1:{port}/").text == "here"
            child.terminate()


def test_ports_that_are_let_go_can_be_given_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    few = few_ports(monkeypatch, 8)
    assert hold_port(few[0])
    for _ in range(3):
        with releasing_ports():
            assert few[0] not in free_ports(6)
    assert few[0] not in free_ports(6)


def test_a_port_that_somebody_listens_on_cannot_be_held() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert not hold_port(other.getsockname()[1])


def test_the_brokers_of_two_runs_have_ports_of_their_own(tmp_path: Path) -> None:
    seen: set[int] = set()
    for name in ("one", "two"):
        brokers = plan_brokers(tmp_path / name, "secret")
        mine = {brokers.nats_port, brokers.redis_port, brokers.s3_port}
        assert len(mine) == 3
        assert not mine & seen
        seen |= mine


def test_a_machine_without_free_ports_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    few_ports(monkeypatch, 3)
    with pytest.raises(UserError, match="fewer than 4 ports"):
        free_ports(4)
