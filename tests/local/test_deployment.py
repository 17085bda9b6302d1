"""`digenrl keys init`: a folder from which brokers and services of a deployment start."""

import asyncio
import dataclasses
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.brokers.deployment import BrokerAddresses, make_deployment
from digenrl.local.brokers.embedded import Brokers, plan_brokers
from digenrl.local.brokers.nats_config import server_config
from digenrl.local.processes.ports import free_ports
from digenrl.local.secrets.certificates import authority_in
from digenrl.local.secrets.keys import Keys, keys_in
from digenrl.local.secrets.tokens import Tokens
from shared.bus.bus import Bus
from shared.bus.connection import open_connection
from shared.errors import UserError
from shared.messages.rights import ROLES
from shared.process.http_access import Access
from shared.process.service import Health, serve, worker_app
from shared.process.settings import Endpoints, HttpSettings
from shared.process.trust import trusted_with
from tests.brokers import StartProgram, program


def test_one_command_makes_all_keys_and_a_second_one_keeps_them(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    ran = CliRunner().invoke(
        app, ["keys", "init", str(folder), "--run", "digits", "--nats", "here:4222"]
    )
    assert ran.exit_code == 0 and f"DIGENRL_SECRETS_DIR={folder}/<role>" in ran.output
    before = {role: Keys(folder).secret(role) for role in ROLES}
    token = Tokens(folder).token("admin")
    assert not any(secret in ran.output for secret in (*before.values(), token))
    CliRunner().invoke(app, ["keys", "init", str(folder), "--run", "digits"])
    assert {role: Keys(folder).secret(role) for role in ROLES} == before
    assert Tokens(folder).token("admin") == token
    assert "nats:4222" in (folder / "rollout" / "digenrl_nats_url").read_text()
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_folder_that_cannot_be_made_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(
        app, ["keys", "init", str(tmp_path / "file" / "keys"), "--run", "digits"]
    )
    assert isinstance(ran.exception, UserError)
    said = str(ran.exception)
    assert said.startswith(f"{tmp_path}/file/keys: ") and "cannot be written" in said
    assert "\n" not in said


def test_a_service_of_a_role_finds_its_secrets_in_the_folder_that_is_named_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_deployment(tmp_path, BrokerAddresses(nats="n:1", redis="r:2", s3="http://s:3"))
    for role in ROLES:
        monkeypatch.setenv("DIGENRL_SECRETS_DIR", str(tmp_path / role))
        found = Endpoints()
        secret = Keys(tmp_path).secret(role)
        assert found.nats_url.get_secret_value() == f"nats://{role}:{secret}@n:1"
        assert found.redis_url.get_secret_value() == f"redis://{role}:{secret}@r:2"
        assert (found.store_url, found.s3_endpoint) == ("s3://digenrl", "http://s:3")
        assert secret not in repr(found)


def test_a_nats_server_takes_the_configuration(tmp_path: Path, start: StartProgram) -> None:
    [port, monitor] = free_ports(2)
    places = BrokerAddresses(nats=f"127.0.0.1:{port}", redis="r:2", s3="http://s:3")
    make_deployment(tmp_path / "keys", places)
    planned: Brokers = plan_brokers(tmp_path / "other", keys_in(tmp_path / "keys"))
    config = tmp_path / "keys" / "brokers" / "nats" / "nats.conf"
    text = config.read_text().replace('"/data"', f'"{tmp_path}/data"')
    config.write_text(text.replace("127.0.0.1:8222", f"127.0.0.1:{monitor}"))
    nats = program(planned, "nats")

    async def ready() -> bool:
        url = (tmp_path / "keys" / "client" / "digenrl_nats_url").read_text()
        async with Bus.connect(url, run="demo", name="x"):
            return True

    start(dataclasses.replace(nats, argv=[nats.argv[0], "--config", str(config)], ready=ready))


async def test_a_service_answers_with_a_certificate_of_that_command(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "ca")
    made = authority.certificate(tmp_path / "tls", ["localhost", "127.0.0.1"])
    cert, key = made.cert, made.key
    assert key.stat().st_mode & 0o777 == 0o600
    listener = HttpSettings(tls_cert=cert, tls_key=key).listen("0.0.0.0", 0)
    done = asyncio.Event()

    async def work() -> None:
        await done.wait()

    serving = asyncio.create_task(
        serve(worker_app("reward", Health()), work(), listener=listener, access=Access())
    )
    url = f"https://127.0.0.1:{listener.socket.getsockname()[1]}"
    trusted = trusted_with(authority.pem)
    try:
        async with asyncio.timeout(20), httpx.AsyncClient(verify=trusted) as client:
            while True:
                try:
                    answer = await client.get(f"{url}/livez")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
            assert answer.json() == {"status": "alive"}
            assert (await client.get(f"{url}/metrics")).status_code == 401
    finally:
        done.set()
        await serving
    assert listener.url.startswith("https://")


async def test_a_client_that_trusts_another_authority_is_refused_for_good(
    tmp_path: Path, brokers: Brokers
) -> None:
    tls = authority_in(tmp_path / "ca").certificate(tmp_path / "tls", ["127.0.0.1"])
    address = f"127.0.0.1:{free_ports(1)[0]}"
    (config := tmp_path / "nats.conf").write_text(
        server_config(tmp_path / "streams", listen=address, keys="secret", tls=tls)
    )
    server = program(brokers, "nats").argv[0]
    running = await asyncio.create_subprocess_exec(server, "--config", str(config))
    other = trusted_with(authority_in(tmp_path / "another").pem)
    try:
        with pytest.raises(UserError, match="has a certificate that DIGENRL_CA does not verify"):
            await open_connection(f"tls://digenrl:secret@{address}", "host", other)
    finally:
        running.kill()
        await running.wait()


def test_a_certificate_for_no_name_is_refused(tmp_path: Path) -> None:
    for name in ("a,b=c", "10.0.0.1:22", "10.0.0.0/8", ""):
        with pytest.raises(UserError, match=f"--tls: '{name}' is no name of a host"):
            authority_in(tmp_path / "ca").certificate(tmp_path / "tls", [name])
