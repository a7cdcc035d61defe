"""Where process 0 listens: on one interface, never on all."""

import ipaddress
import socket

import pytest

from torch_shard._hosts import interfaces
from torch_shard._hosts.interfaces import listen


@pytest.fixture
def address(monkeypatch):
    """The address on which process 0 listens with this coordinator, and this TORCH_SHARD_HOST."""

    def address(coordinator, told=None):
        monkeypatch.delenv("TORCH_SHARD_HOST", raising=False)
        if told is not None:
            monkeypatch.setenv("TORCH_SHARD_HOST", told)
        with listen(coordinator) as held:
            name = held.getsockname()[0]
        assert not ipaddress.ip_address(name).is_unspecified
        return name

    return address


@pytest.fixture
def routes(monkeypatch):
    """A default route from this address, which is here."""
    monkeypatch.setattr(interfaces, "_of_default_route", lambda: ["127.0.0.3"])


def test_it_is_the_coordinators_interface(address, routes):
    assert address("127.0.0.2:1234") == "127.0.0.2"
    assert address("localhost:1234") in ("127.0.0.1", "::1")
    assert address("[::1]:1234") in ("::1", "127.0.0.3")  # a host without IPv6


def test_no_other_interface_answers():
    with listen("127.0.0.1:1234") as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", held.getsockname()[1]), 5)


@pytest.mark.parametrize("coordinator", [None, "203.0.113.9:1", "no-such-host.invalid:1", "0.0.0.0:1", "[::]:1"])
def test_of_a_coordinator_elsewhere_it_is_the_default_route(address, routes, coordinator):
    assert address(coordinator) == "127.0.0.3"


def test_a_name_for_the_loopback_is_not_where_others_come(address, routes, monkeypatch):
    """As Debian has it in /etc/hosts: the host's own name is 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0)) for name in ("127.0.1.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert address("node001:1234") == "127.0.0.3"


def test_without_a_route_it_is_the_loopback(address, monkeypatch):
    monkeypatch.setattr(interfaces, "_of_default_route", lambda: [])
    assert address(None) == "127.0.0.1"


def test_the_variable_decides(address, routes):
    assert address("127.0.0.2:1234", told="127.0.0.4") == "127.0.0.4"
    for wrong in ("203.0.113.9", "0.0.0.0", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"^TORCH_SHARD_HOST must be an address of the host .*, found {wrong}$"):
            address("127.0.0.2:1234", told=wrong)


def test_the_real_default_route_is_of_this_host():
    for name in interfaces._of_default_route():
        socket.create_server((name, 0), family=socket.AF_INET6 if ":" in name else socket.AF_INET).close()
