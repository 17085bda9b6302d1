"""docs/troubleshooting.md quotes error lines that the product still has."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.paths import ROOT

QUOTED = re.findall(
    r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE
)


def literals() -> Iterator[str]:
    """Texts of the product's sources, each as it is printed, without the values within."""
    for room in ("digenrl", "services", "shared"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.fixture(scope="module")
def product() -> str:
    return "\n".join(literals())


def test_lines_are_quoted() -> None:
    assert len(QUOTED) > 30 and len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("line", QUOTED)
def test_an_error_line_occurs_in_the_product(line: str, product: str) -> None:
    missing = [part for part in line.split("...") if part.strip() and part not in product]
    assert missing == [], "quote the line as the product prints it now"
