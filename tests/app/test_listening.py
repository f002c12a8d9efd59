"""Sockets are taken early and answer late."""

import errno
import socket

import pytest

from app.listening import CannotListen, bind

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])  # the last: of every family that there is
def test_what_is_bound_refuses_connections_until_it_listens(host: str):
    for bound in bind(host, 0):
        address = (LOOPBACK[bound.family], bound.getsockname()[1])
        with bound, socket.socket(bound.family) as early, socket.socket(bound.family) as late:
            assert errno.ECONNREFUSED == early.connect_ex(address)
            bound.listen()
            assert 0 == late.connect_ex(address)


def test_a_port_in_use_is_told_with_the_flag_that_names_another():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CannotListen, match=f"^port {port} is in use, --port names another$"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_ours_is_told(host: str):
    with pytest.raises(CannotListen, match=f"^--host {host}, --port 0: "):
        bind(host, 0)
