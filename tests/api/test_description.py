"""The committed description of the HTTP API is that of the code."""

import json

from digenrl.api.description import text
from tests.paths import ROOT

COMMITTED = ROOT / "docs" / "openapi.json"


def test_the_committed_description_is_that_of_the_code() -> None:
    renew = "python -m digenrl.api.description > docs/openapi.json"
    assert COMMITTED.read_text() == text(), f"renew it: {renew}"
    assert json.loads(COMMITTED.read_text())["openapi"].startswith("3.1")


def test_every_answer_has_a_documented_content_type() -> None:
    for path, operations in json.loads(COMMITTED.read_text())["paths"].items():
        for operation in operations.values():
            assert operation["operationId"] and operation["tags"], path
            for status, answer in operation["responses"].items():
                types = set(answer["content"])
                is_error = int(status) >= 400 and status != "503"
                assert types and (types == {"application/problem+json"} or not is_error), path
