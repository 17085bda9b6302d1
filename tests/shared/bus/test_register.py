"""The register on a real NATS server: of two writers on top of the same entry, one fails."""

from shared.bus.bus import Bus
from shared.bus.register import Register, RegisterEntry


async def test_of_two_that_write_an_empty_register_one_fails(bus: Bus) -> None:
    register = Register(bus.jetstream, "DG_LEASE_test", ttl_s=60.0)
    await register.create()
    assert await register.read() is None
    assert await register.write(b"first", replaces=0) == 1
    assert await register.write(b"second", replaces=0) is None
    assert await register.read() == RegisterEntry(1, b"first")
    assert await register.write(b"third", replaces=1) == 2
    assert await register.write(b"fourth", replaces=1) is None
    assert await register.read() == RegisterEntry(2, b"third")
