"""The register on a real NATS server: of two writers on top of the same entry, one fails."""

from shared.bus.bus import Bus
from shared.bus.register import Register, RegisterEntry


async def test_of_two_that_write_an_empty_register_one_fails(bus: Bus) -> None:
    register = Register(bus.jetstream, "DG_LEASE_test", seconds=60.0)
    await register.make()
    assert await register.read() is None
    assert await register.write(b"first", on=0) == 1
    assert await register.write(b"second", on=0) is None
    assert await register.read() == RegisterEntry(1, b"first")
    assert await register.write(b"third", on=1) == 2
    assert await register.write(b"fourth", on=1) is None
    assert await register.read() == RegisterEntry(2, b"third")
