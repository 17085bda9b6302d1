"""`digenrl push` puts a run's adapter and its card on the hub: here, a mirror on this machine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from digenrl.commands import cli
from tests.hub.mirror import TOKEN, Mirror, in_use

# huggingface_hub gives its HTTP library a file in an older way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with in_use(tmp_path / "home", monkeypatch, TOKEN) as found:
        yield found


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    adapter = tmp_path / "runs" / "mine" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "README.md").write_text("---\nbase_model: org/base\n---\n# An adapter\n")
    (adapter / "pytorch_lora_weights.safetensors").write_bytes(bytes(range(256)) * 40)
    (adapter / "curve.png").write_bytes(b"a picture")
    (adapter / "notes.txt").write_text("not for the hub")
    return tmp_path / "runs"


def push(runs: Path, *words: str) -> int:
    typed = ["digenrl", "push", *words, "--runs", str(runs)]
    with mock.patch.object(sys, "argv", typed), pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_an_adapter_is_pushed_with_its_card(
    hub: Mirror, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(runs, "mine", "me/mine", "--private", "--message", "Step 30") == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == f"{hub.url}/me/mine"
    repository = hub.repositories["me/mine"]
    adapter = runs / "mine" / "adapter"
    assert repository.files == {
        name: (adapter / name).read_bytes()
        for name in ("README.md", "pytorch_lora_weights.safetensors", "curve.png")
    }
    assert (repository.private, repository.messages) == (True, ["Step 30"])
    (adapter / "README.md").write_text("# Better")
    assert push(runs, str(adapter), "me/mine") == 0
    assert repository.files["README.md"] == b"# Better"


def test_what_cannot_be_pushed_is_one_line(
    hub: Mirror, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(runs, "other", "me/mine") == 2
    assert "holds no adapter with its card" in capsys.readouterr().err
    assert push(runs, "mine", "mine") == 2
    assert "REPOSITORY: 'mine' is not org/name" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert push(runs, "mine", "me/mine") == 2
    assert "set HF_TOKEN" in capsys.readouterr().err
