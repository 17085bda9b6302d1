"""docs/security.md shows the roles as they are."""

import pytest

from tests.local.roles_table import api_table, messages_table, store_table
from tests.paths import ROOT


@pytest.mark.parametrize("table", [api_table, messages_table, store_table])
def test_a_table_of_the_page_is_the_description(table: "object") -> None:
    assert callable(table)
    said = (ROOT / "docs" / "security.md").read_text()
    assert table() in said, f"put this into docs/security.md:\n{table()}"
