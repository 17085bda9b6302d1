"""`digenrl hosts`: what is written for each host of a lab, and which commands would be typed."""

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.hosts.units import read_hosts, unit_text, write_units
from shared.errors import UserError

LAB = """run = "lab"
recipe = "digits.toml"
address = "10.0.0.1"

[hosts.alpha]
roles = "trainer,reward"

[hosts.beta]
roles = "rollout"
ssh = "me@beta"
gpus = "0-3"
environment = { DIGENRL_MODELS = "/data/models" }

[hosts.gamma]
roles = "rollout"
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.toml").write_text(LAB)
    return tmp_path


def test_three_hosts_take_at_most_twenty_lines() -> None:
    assert len(LAB.splitlines()) <= 20


def test_a_unit_starts_digenrl_host_and_leaves_restarts_to_systemd(lab: Path) -> None:
    hosts = read_hosts(lab / "hosts.toml")
    beta = unit_text(hosts, "beta").splitlines()
    assert "Restart=on-failure" in beta and "RestartPreventExitStatus=2" in beta
    assert (
        "ExecStart=%h/digenrl/.venv/bin/digenrl host --keys %h/.local/share/digenrl/lab/keys "
        "--roles rollout --until finished --gpus 0-3"
    ) in beta
    assert "--at 10.0.0.1 --recipe digits.toml --run lab" in unit_text(hosts, "alpha")
    delays = {unit_text(hosts, name).partition("RestartSec=")[2][:3] for name in hosts.hosts}
    assert len(delays) == 3, "hosts that all lost a broker do not come back at once"


def test_a_host_gets_the_keys_of_its_roles_alone_and_only_this_user_reads_them(lab: Path) -> None:
    write_units(read_hosts(lab / "hosts.toml"), lab / "out")
    assert {path.name for path in (lab / "out/beta/keys").iterdir()} == {"hosts.env", "rollout"}
    secret = (lab / "out/keys/trainer/secret").read_text().strip()
    texts = [path.read_text() for path in (lab / "out/beta").rglob("*") if path.is_file()]
    assert secret and not any(secret in text for text in texts)
    modes = [os.lstat(path).st_mode for path in (lab / "out/alpha/keys").rglob("*")]
    assert not any(mode & (stat.S_IRWXG | stat.S_IRWXO) for mode in modes if stat.S_ISREG(mode))


def test_units_written_again_are_the_same(lab: Path) -> None:
    hosts = read_hosts(lab / "hosts.toml")
    write_units(hosts, lab / "out")
    before = {name: (lab / "out" / name / "applied").read_text() for name in hosts.hosts}
    write_units(hosts, lab / "out")
    assert before == {name: (lab / "out" / name / "applied").read_text() for name in hosts.hosts}


def test_spaces_and_lines_between_gpus_stay_out_of_the_unit(lab: Path) -> None:
    (lab / "hosts.toml").write_text(LAB.replace('"0-3"', '"0,\\n 2"'))
    assert "--gpus 0,2\n" in unit_text(read_hosts(lab / "hosts.toml"), "beta")


def test_a_folder_with_other_files_is_not_emptied(lab: Path) -> None:
    (lab / "alpha").mkdir()
    (lab / "alpha/mine.txt").touch()
    with pytest.raises(UserError, match=r"--out: .*alpha has other files"):
        write_units(read_hosts(lab / "hosts.toml"), lab)
    assert (lab / "alpha/mine.txt").exists()


def test_a_role_of_which_no_step_can_do_without_is_named_if_no_host_has_it(lab: Path) -> None:
    (lab / "hosts.toml").write_text(LAB.replace("trainer,reward", "trainer"))
    said = CliRunner().invoke(app, ["hosts", "units"], catch_exceptions=False).output
    assert "no host has the role reward: the run waits for one" in said


def test_a_plan_prints_every_command_and_no_secret(lab: Path) -> None:
    said = CliRunner().invoke(app, ["hosts", "apply", "--plan"], catch_exceptions=False).output
    assert "scp -o BatchMode=yes" in said and "me@beta:.local/share/digenrl/lab/" in said
    secrets = [path.read_text().strip() for path in (lab / "hosts/keys").glob("*/secret")]
    assert len(secrets) > 5 and not any(secret in said for secret in secrets)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('run = "lab"', 'run = "a b"'), "run: "),
        (("trainer,reward", "trainer,judge"), "hosts.alpha.roles: judge is unknown"),
        (('gpus = "0-3"', 'gpus = "3-0"'), "hosts.beta.gpus: '3-0'"),
        (('ssh = "me@beta"', 'ssh = "me@beta; rm -rf ~"'), "hosts.beta.ssh: "),
        (('ssh = "me@beta"', 'ssh = "-oProxyCommand=/bin/x"'), "hosts.beta.ssh: '-oProxy"),
        (('ssh = "me@beta"', 'ssh = "alpha"'), "hosts.beta.ssh: is the host of alpha"),
        (('"trainer,reward"', '","'), "hosts.alpha.roles: names no role"),
        (("10.0.0.1", "0.0.0.0"), "address: 0.0.0.0 is no IPv4 address"),
        (("10.0.0.1", "10.0.0.1:22"), "address: '10.0.0.1:22' is no address"),
        (("digits.toml", "~/digits.toml"), "recipe: '~/digits.toml'; use a path; %h"),
        (("digits.toml", "--keys"), "recipe: '--keys'; use a path"),
        (("digits.toml", "100%.toml"), "recipe: '100%.toml'; use a path"),
        (
            ('ssh = "me@beta"', 'digenrl = "bin/digenrl"'),
            "hosts.beta.digenrl: 'bin/digenrl'; use an",
        ),
        (("DIGENRL_MODELS =", '"A=B" ='), "hosts.beta.environment.A=B: 'A=B'; use letters"),
        (('"/data/models"', '"x\\nB=y"'), "hosts.beta.environment.DIGENRL_MODELS: "),
        (("[hosts.alpha]", "[hosts.keys]"), "hosts.keys: names the folder of all keys"),
        (("[hosts.beta]", '[hosts."a b"]'), "hosts.a b: 'a b'; use 1 to 64 letters"),
        (('run = "lab"', "run = 3"), "run: write a text in quotes"),
        (('run = "lab"', ""), "run: missing"),
        ((LAB[LAB.index("[hosts.a") :], "[hosts]"), "hosts: has no host"),
        ((LAB[LAB.index("[hosts.a") :], "[hosts]\na = 3"), "hosts.a: write a table"),
        (("lab", "\udcff"), "--file: "),
        (('ssh = "me@beta"', 'user = "me"'), "hosts.beta.user: unknown key"),
        (("[hosts.gamma]", "[hosts.gamma"), "--file: "),
    ],
)
def test_a_wrong_file_is_refused_in_a_line_that_names_the_key(
    change: tuple[str, str], line: str, lab: Path
) -> None:
    (lab / "hosts.toml").write_text(LAB.replace(*change), "utf-8", "surrogateescape")
    with pytest.raises(UserError) as refused:
        read_hosts(lab / "hosts.toml")
    assert str(refused.value).startswith(line), refused.value


def test_a_missing_ssh_is_a_line(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(lab))
    refused = CliRunner().invoke(app, ["hosts", "status"])
    assert str(refused.exception).startswith("ssh: No such file or directory; install OpenSSH")


def test_a_folder_that_cannot_be_written_is_a_line(lab: Path) -> None:
    (lab / "file").touch()
    refused = CliRunner().invoke(app, ["hosts", "units", "--out", "file"])
    assert str(refused.exception).startswith("--out: file")
