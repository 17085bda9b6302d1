"""500 keys that try to leave the store: none reads, writes or deletes anything."""

import itertools
from pathlib import Path

import pytest

from shared.errors import ContractError
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from shared.store.folder import FolderBackend

UPS = (
    "..", ".", "%2e%2e", "..%2f", "%2e%2e%2f", "..\\", "%252e%252e", "%uff0e%uff0e", "．．", "..;",
    "..%00", "..%c0%af", "....//", "..%5c", "~", "", " ", "\0", "\n", "-", "%2f..", "..|", ".%2e",
)  # fmt: skip
SHAPES = (
    "{up}/secret", "{up}/{up}/secret", "run/{up}/{up}/secret", "run/{up}", "{up}", "/{up}/secret",
    "run//{up}/secret", "run/{up}/commits/00000001.json", "{up}{up}/secret", "run/weights/{up}/x",
    "{up}\\secret", "run\\{up}\\secret", "./{up}/secret", "run/./{up}/secret", "{up}/run/../secret",
    "run/{up}/", "run/x/{up}/{up}/{up}/{up}/etc/passwd", "file:///{up}/secret", "{up}:secret",
    "run/{up}?x=1", "run/{up}#x", "C:{up}\\secret", "\\\\host\\{up}", "run/{up}\t", "$HOME/{up}",
)  # fmt: skip
MORE = (
    "/etc/passwd", "/proc/self/environ", "//etc/passwd", "run/\r\nx", "a" * 513,
    "run/" + "x/" * 300, "é", "run/é", "run/x y", "run/x\u202ey", "run/x*", "run/x|y",
    ".hidden", "run/.hidden",
)  # fmt: skip
KEYS = sorted({shape.format(up=up) for shape, up in itertools.product(SHAPES, UPS)} | set(MORE))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the store, with a secret."""
    for name in ("secret", "x"):
        (tmp_path / name).write_text("kept")
    return tmp_path


async def test_500_keys_reach_nothing_outside_the_store(outside: Path) -> None:
    store = ObjectStore(FolderBackend(outside / "store"))
    wrong = [key for key in KEYS if ".." in key or not key.replace("/", "").isalnum()]
    assert len(wrong) >= 500
    await store.write("run/kept", b"inside")

    def files() -> dict[str, str]:
        return {str(f): f.read_text() for f in outside.rglob("*") if f.is_file()}

    before = files()
    for key in wrong:
        with pytest.raises(ContractError, match="is not an object key"):
            await store.read(key)
        with pytest.raises(ContractError):
            await store.write(key, b"x")
        with pytest.raises(ContractError):
            await store.create(key, b"x")
        with pytest.raises(ContractError):
            await store.delete([key])
        with pytest.raises(ContractError):
            await store.keys(key)
        with pytest.raises((ContractError, ValueError)):
            await store.get(ObjectRef(key=key, sha256="0" * 64, size=4))
    assert files() == before
