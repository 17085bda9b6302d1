"""Places where people run it: odd folders, proxies, limits, no home."""

import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.paths import ROOT

CLOSED = "http://127.0.0.1:9"
"""A proxy that does not answer."""
PROXIES = {
    case(name): CLOSED
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    for case in (str.upper, str.lower)
}
NO_PROXY = {"NO_PROXY": "localhost,.corp.example", "no_proxy": "localhost,.corp.example"}
PROMPTS = "a cat\na dog\n"
WORDS = "一只戴帽子的猫 🎩 مرحبا قطة\nKatze – „süß“ <b>&amp;</b> $(id) `x`\n"


@dataclass(frozen=True)
class Surroundings:
    folder: str = "plain"
    environment: dict[str, str] = field(default_factory=dict)
    shell: str = ""
    """Commands before it, in the same shell."""
    prompts: str = PROMPTS
    prompts_file: str = "p.txt"
    is_bare: bool = False
    """Whether the environment has nothing else than the path."""
    is_read_only: bool = False
    """Whether the model's files are."""

    def make(self, parent: Path) -> Path:
        """Make the folder, with the prompts and folders for a home and for temporary files."""
        folder = parent / self.folder
        for each in (folder / "home", folder / "temporary"):
            each.mkdir(parents=True)
        (folder / self.prompts_file).write_text(self.prompts)
        return folder

    def protect(self, model: Path) -> None:
        if self.is_read_only:
            for path in model.rglob("*"):
                path.chmod(path.stat().st_mode & ~0o222)

    def variables(self, folder: Path) -> dict[str, str]:
        bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        here = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
        proxies = set(PROXIES) | set(NO_PROXY)
        inherited = {name: value for name, value in os.environ.items() if name not in proxies}
        return bare if self.is_bare else inherited | bare | here | self.environment

    def command(self, *words: str) -> list[str]:
        """Return what types ``digenrl`` with these words."""
        script = f'{self.shell} exec "$0" -m digenrl "$@"'
        return ["/bin/sh", "-c", script, sys.executable, *words]


WORST = Surroundings(
    folder=f'ü my (1) runs, it\'s 模型 100%25 #1 "q" [x]/{"long " * 15}',
    environment=PROXIES | {"LC_ALL": "C"},
    shell="ulimit -n 1024;",
    prompts=WORDS,
    prompts_file="prömpts 模型.txt",
    is_read_only=True,
)
"""All of them at once."""


def check_left(folder: Path, run: Path, output: str) -> None:
    """A run has left its adapter, nothing outside its folder, and no traceback."""
    assert "Traceback" not in output, output
    assert list((run / "adapter").iterdir())
    assert not list((folder / "temporary").glob("*seaweed*")), "it leaves nothing outside the run"
    assert not list((folder / "temporary").glob("weed*"))
    assert "Skipping optional" not in (run / "logs/objects.log").read_text(), "its ports are open"


def make_writable(folder: Path) -> None:
    """Let pytest delete what a place has made read-only."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
