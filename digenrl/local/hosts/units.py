"""Hosts of a lab as systemd units: one unit per host starts `digenrl host`, and nothing else.

A host's settings and secrets are written into a folder and copied there with the system's `scp`;
its `ssh` calls `systemctl --user`. systemd restarts, and the scheduler places work.
"""

import hashlib
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from digenrl.local.brokers.deployment import BrokerAddresses, make_deployment
from digenrl.local.hosts.first_host import check_address
from digenrl.local.hosts.host import parse_gpus, parse_roles
from digenrl.local.secrets.tokens import KEYS, write_secret
from shared.errors import Faults, UserError
from shared.messages.records import TOKEN_PATTERN, TOKEN_WORDS, Token

PLACE = ".local/share/digenrl"
"""Folder of runs in the home of a host."""
ENVIRONMENT, DIGEST = "host.env", "applied"
SECRETS = "keys tls seaweedfs nats/nats.conf valkey/valkey.conf host.env applied"
"""Files of a run's folder that `down` deletes; its objects stay."""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
WORDS = {
    TOKEN_PATTERN: TOKEN_WORDS,
    r"^[A-Za-z0-9@%_+=:,./~-]{1,255}$": "letters, digits and any of @ % _ + = : , . / ~ -",
    r"^[A-Za-z_][A-Za-z0-9_]{0,99}$": "letters, digits and _",
    r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,254}$": "HOST or USER@HOST; its port belongs in ~/.ssh/config",
    r"^(%h)?/[A-Za-z0-9@_+=:,./-]{1,250}$": "an absolute path; %h is the home folder",
    r"^(%h/)?[A-Za-z0-9_./][A-Za-z0-9@_+=:,./-]{0,250}$": "a path; %h is the home folder",
}
"""Patterns of values, in words; neither a shell nor systemd nor `ssh` misreads such a value."""
_, VALUE, VARIABLE, TARGET, COMMAND, RECIPE = WORDS


class HostTable(BaseModel, extra="forbid", frozen=True):
    """A host in hosts.toml."""

    roles: str
    ssh: str = Field("", pattern=TARGET)
    """As `ssh` takes it; by default the host's name."""
    gpus: str = ""
    digenrl: str = Field("%h/digenrl/.venv/bin/digenrl", pattern=COMMAND)
    """The command on that host; %h is the home folder."""
    environment: dict[
        Annotated[str, Field(pattern=VARIABLE)], Annotated[str, Field(pattern=VALUE)]
    ] = Field(default_factory=dict)


class HostsFile(BaseModel, extra="forbid", frozen=True):
    """Describes the hosts of a run; the first has brokers and scheduler."""

    run: Token
    recipe: str = Field(pattern=RECIPE)
    """As the first host finds it from its user's home, or the name of one that comes with
    DigenRL."""
    address: str
    """Address of the first host for the others."""
    hosts: dict[Token, HostTable]

    @property
    def unit(self) -> str:
        return f"digenrl-{self.run}.service"


def read_hosts(path: Path) -> HostsFile:
    """Read hosts.toml; raises UserError with a line for each fault."""
    import tomllib

    try:
        hosts = HostsFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise UserError(f"--file: {path}: {error.strerror}") from error
    except ValidationError as error:
        raise UserError("\n".join(map(_fault, error.errors(include_url=False)))) from error
    except ValueError as error:
        raise UserError(f"--file: {path}: {error}") from error
    faults, targets = Faults(), dict[str, str]()
    with faults.collected():
        check_address(hosts.address, "address")
    for name, table in hosts.hosts.items():
        with faults.collected():
            parse_roles(table.roles or ",", f"hosts.{name}.roles")
            parse_gpus(table.gpus or "0", f"hosts.{name}.gpus")
        other = targets.setdefault(table.ssh or name, name)
        if other != name:
            faults.append(f"hosts.{name}.ssh: is the host of {other}; write one table for a host")
    if KEYS in hosts.hosts:
        faults.append(f"hosts.{KEYS}: names the folder of all keys; choose another, and set ssh")
    if not hosts.hosts:
        faults.append("hosts: has no host; write a table [hosts.NAME] for each")
    faults.raise_any()
    return hosts


def _fault(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"] if part != "[key]")
    if fault["type"] == "extra_forbidden":
        table = HostTable if len(fault["loc"]) > 1 else HostsFile
        return f"{where}: unknown key; use one of {', '.join(table.model_fields)}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{where}: {fault['input']!r}; use {WORDS[fault['ctx']['pattern']]}"
    kinds = {"missing": "missing; it has no default", "dict_type": "write a table"}
    kinds["model_type"] = kinds["dict_type"]
    return f"{where}: {kinds.get(fault['type'], 'write a text in quotes')}"


def write_units(hosts: HostsFile, out: Path) -> None:
    """Write what each host needs to a folder of its name; keys are made once, in `out/keys`.

    Raises UserError or OSError if a folder has files of others or cannot be written.
    """
    keys, first = out / KEYS, next(iter(hosts.hosts))
    for folder in (out / name for name in hosts.hosts):
        if folder.is_dir() and any(folder.iterdir()) and not (folder / KEYS).is_dir():
            raise UserError(f"--out: {folder} has other files; name another folder")
    at = hosts.address
    places = BrokerAddresses(
        nats=f"{at}:4222", redis=f"{at}:6379", s3=f"http://{at}:8333", tls=[at]
    )
    make_deployment(keys, places, [hosts.run])
    for name, table in hosts.hosts.items():
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "keys").mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
        chosen = None if name == first else ["hosts.env", *parse_roles(table.roles, "roles")]
        for path in keys.iterdir():
            if chosen is None or path.name in chosen:
                copy = shutil.copytree if path.is_dir() else shutil.copy
                copy(path, folder / "keys" / path.name)
        lines = (f'{key}="{value}"\n' for key, value in table.environment.items())
        write_secret(folder / ENVIRONMENT, "".join(lines))
        (folder / hosts.unit).write_text(unit_text(hosts, name))
        write_secret(folder / DIGEST, _digest(folder))


def unit_text(hosts: HostsFile, name: str) -> str:
    """Return the unit of a host."""
    table, place = hosts.hosts[name], f"%h/{PLACE}/{hosts.run}"
    roles, gpus = ",".join(parse_roles(table.roles, "roles")), "".join(table.gpus.split())
    words = [table.digenrl, "host", "--keys", f"{place}/keys", "--roles", roles]
    words += ["--until", "finished", *(["--gpus", gpus] if gpus else [])]
    if name == next(iter(hosts.hosts)):
        words += ["--at", hosts.address, "--recipe", hosts.recipe, "--run", hosts.run]
    delay = 2 + zlib.crc32(f"{hosts.run} {name}".encode()) % 80 / 10
    return f"""[Unit]
Description=DigenRL: the run {hosts.run} on {name}
StartLimitIntervalSec=0

[Service]
EnvironmentFile={place}/{ENVIRONMENT}
WorkingDirectory=%h
ExecStart={" ".join(words)}
Restart=on-failure
RestartPreventExitStatus=2
RestartSec={delay}
TimeoutStopSec=60
KillMode=mixed

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True)
class Shell:
    """Runs commands here, or prints them."""

    plans: bool
    say: Callable[[str], None]

    def run(self, *words: str) -> str:
        """Return what a command prints.

        Raises:
            UserError: if it fails.
        """
        if self.plans:
            self.say(shlex.join(words))
            return ""
        try:
            ended = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}; install OpenSSH's client") from error
        if ended.returncode:
            last = ended.stderr.strip().rpartition("\n")[2] or f"status {ended.returncode}"
            raise UserError(f"{shlex.join(words[:6])} ...: {last}")
        return ended.stdout.strip()


def apply(hosts: HostsFile, out: Path, shell: Shell) -> None:
    """Copy what each host needs, and start its unit. A host that has it all is left alone.

    Raises:
        UserError: for the first host that cannot be reached, or would end its user's units when the
            user logs out.
    """
    _each(hosts, shell, lambda name, at: _apply(hosts, name, at, out / name, shell))


def _apply(hosts: HostsFile, name: str, at: str, folder: Path, shell: Shell) -> str:
    place, unit = f"{PLACE}/{hosts.run}", hosts.unit
    ask = (
        f'loginctl show-user "$(id -un)" --property=Linger --value; mkdir -p -m 700 {place}; '
        f"echo $(cat {place}/{DIGEST}) $(systemctl --user is-active {unit})"
    )
    lingers, *applied = shell.run(*SSH, at, ask).split() or [""]
    if lingers != "yes" and not shell.plans:
        raise UserError(f"{name}: units would end at log-out; type there: loginctl enable-linger")
    digest = (folder / DIGEST).read_text()
    if applied in ([digest, "active"], [digest, "activating"]):
        return "unchanged"
    if digest not in applied:
        shell.run("scp", *SSH[1:], "-rpq", *map(str, sorted(folder.iterdir())), f"{at}:{place}/")
    start = (
        f"mkdir -p .config/systemd/user && cp {place}/{unit} .config/systemd/user/ && systemctl "
        f"--user daemon-reload && systemctl --user enable {unit} && systemctl --user restart {unit}"
    )
    shell.run(*SSH, at, start)
    return "started"


def status(hosts: HostsFile, shell: Shell) -> None:
    """Print a line for each host: what its unit does, how often it was restarted, its last line."""
    fields = "--property=ActiveState,Result,NRestarts"
    ask = (
        f"systemctl --user show {hosts.unit} {fields} | tr '\\n' ' '; "
        f"journalctl --user --unit {hosts.unit} --lines 1 --output cat "
        '--grep \'"svc": "host"|^digenrl: \' || true'
    )
    _each(hosts, shell, lambda _, at: shell.run(*SSH, at, ask))


def down(hosts: HostsFile, shell: Shell) -> None:
    """Stop each host, and delete its unit and its keys; what the run has stored stays."""
    unit, place = hosts.unit, f"{PLACE}/{hosts.run}"
    words = (
        f"systemctl --user disable --now {unit}; rm -f .config/systemd/user/{unit}; "
        f"systemctl --user daemon-reload; cd {place} && rm -rf {unit} {SECRETS} || true"
    )
    _each(hosts, shell, lambda _, at: shell.run(*SSH, at, words) or "down")


def _each(hosts: HostsFile, shell: Shell, act: Callable[[str, str], str]) -> None:
    """Do something for all hosts at once, print the output of each, and raise the first error."""
    with ThreadPoolExecutor(1 if shell.plans else 16) as pool:
        results = {name: pool.submit(act, name, t.ssh or name) for name, t in hosts.hosts.items()}
    for name, each in results.items():
        if not shell.plans and each.exception() is None:
            shell.say(f"{name}: {each.result()}")
    for each in results.values():
        each.result()


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = (f"{path.relative_to(folder)}\0".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()
