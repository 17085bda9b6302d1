"""An algorithm for storms that has everything on at once: paths of a shared noise, as those with a
ratio have them, and an old policy, as those without one may have."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from shared.learning.algorithms import ALGORITHMS, Method

NAME = "emulated"
METHOD = Method(
    "shared.diffusion.training.objective:nft", ("flow",), has_ratio=False, has_old_policy=True
)


@contextmanager
def known() -> Iterator[None]:
    """Have recipes know it meanwhile: the devices are emulated, so that nobody calls its loss."""
    with patch.dict(ALGORITHMS, {NAME: METHOD}):
        yield
