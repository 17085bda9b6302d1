"""Examples in docstrings of the product give what they show."""

import doctest
from importlib import import_module

import pytest

from tests.paths import ROOT

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("digenrl", "services", "shared")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    assert not doctest.testmod(import_module(name)).failed
