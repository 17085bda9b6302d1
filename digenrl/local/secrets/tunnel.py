"""TLS for a server that has none: it listens on loopback, and this process in front of it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from digenrl.local.secrets.certificates import Certificate
from shared.errors import UserError

CHUNK = 1 << 16
LOOPBACK = "127.0.0.1"


@contextlib.asynccontextmanager
async def tunnel(at: str, port: int, inner: int, tls: Certificate) -> AsyncIterator[None]:
    """Listen at an address, and pass what comes on to a port of this machine.

    Raises:
        UserError: if the port cannot be taken.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            to_server = await asyncio.open_connection(LOOPBACK, inner)
            ways = (_pass_on(reader, to_server[1]), _pass_on(to_server[0], writer))
            await asyncio.gather(*ways)
        writer.close()

    try:
        server = await asyncio.start_server(connected, at, port, ssl=context)
    except OSError as error:
        raise UserError(
            f"--at: {at}:{port} cannot be used: {error.strerror}; name another"
        ) from error
    try:
        yield
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.close()
