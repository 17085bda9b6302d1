"""The forms of a network's weights that other packages make, and whether these are installed."""

from importlib.util import find_spec

from shared.errors import UserError, how_to_install
from shared.models.memory import Form

PACKAGES: dict[Form, tuple[str, str]] = {
    "int8": ("torchao", "quantised"),
    "fp8": ("torchao", "quantised"),
    "nf4": ("bitsandbytes", "nf4"),
}
"""The package that quantises, and the extra that installs it."""

UNTESTED: frozenset[Form] = frozenset({"fp8", "nf4"})
"""Forms that nobody has reported on from a GPU."""


def check_installed(form: Form | None) -> None:
    """Raises UserError, with the remedy, if the package that makes this form is not installed."""
    if form is None or form not in PACKAGES:
        return
    package, extra = PACKAGES[form]
    if find_spec(package) is None:
        raise UserError(f'rollout.weights: "{form}" {how_to_install(extra)}')
