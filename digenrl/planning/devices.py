"""Reads the names of devices and cost profiles on the command line."""

from services.scheduler.costs.profile import PROFILES, Profile
from shared.errors import UserError

MAX_DEVICES = 256


def parse_devices(option: str, text: str, profile: Profile) -> dict[str, int]:
    """Parse ``h100=16,a100=16`` into {"H100": 16, "A100": 16}.

    Raises:
        UserError: names the option, the problem and the remedy.
    """
    known = {kind.lower(): kind for kind in profile.devices}
    devices: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, count = (piece.strip() for piece in part.partition("="))
        if not equals or not kind:
            raise UserError(f"{option}: {part!r} is not kind=count, e.g. h100=16,a100=16")
        if not count.isdecimal() or int(count) == 0:
            raise UserError(f"{option}: {part!r}: the count is a whole number, 1 or more")
        name = known.get(kind.lower())
        if name is None:
            kinds = ", ".join(profile.devices)
            raise UserError(f"{option}: {profile.name} knows no {kind}; known are {kinds}")
        if name in devices:
            raise UserError(f"{option}: {name} is given twice; add the counts")
        devices[name] = int(count)
    if sum(devices.values()) > MAX_DEVICES:
        raise UserError(f"{option}: more than {MAX_DEVICES} devices; plan for a part of them")
    return devices


def known_profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.json"))
