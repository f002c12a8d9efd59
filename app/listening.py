"""The sockets of `octavo serve`, taken before the model is loaded, so that a mistake in host or port shows at once.

They are bound and do not listen yet: whoever connects is refused until the server is ready.
"""

import asyncio
import errno
import socket


class CannotListen(Exception):
    """The address is not to be had; the message says which flag to change."""


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host, made as asyncio makes a server's. Raises CannotListen."""
    try:
        return asyncio.run(_bind(host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(f"port {port} is in use, --port names another") from error
        raise CannotListen(f"--host {host}, --port {port}: {error.strerror}") from error


async def _bind(host: str, port: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    sockets = [each.dup() for each in server.sockets]  # its own are closed with the loop
    server.close()
    return sockets
