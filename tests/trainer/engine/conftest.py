from collections.abc import Iterator

import pytest

from tests.trainer.engine.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("pipes"))
    yield started
    started.end()
