"""Where process 0 listens: on one interface, never on all."""

import ipaddress
import socket

import pytest

from torch_shard._hosts import interfaces
from torch_shard._hosts.interfaces import open_sockets


@pytest.fixture
def addresses(monkeypatch):
    """The addresses on which process 0 listens with this coordinator, and this TORCH_SHARD_HOST."""

    def addresses(coordinator, told=None):
        monkeypatch.delenv("TORCH_SHARD_HOST", raising=False)
        if told is not None:
            monkeypatch.setenv("TORCH_SHARD_HOST", told)
        found = open_sockets(coordinator)
        names = [held.getsockname()[0] for held in found]
        for held in found:
            held.close()
        assert not any(ipaddress.ip_address(name).is_unspecified for name in names)
        return names

    return addresses


@pytest.fixture
def routes(monkeypatch):
    """A default route from this address, which is here."""
    monkeypatch.setattr(interfaces, "_of_default_route", lambda: ["127.0.0.3"])


def test_it_is_the_coordinators_interface(addresses, routes):
    assert addresses("127.0.0.2:1234") == ["127.0.0.2"]
    assert set(addresses("localhost:1234")) <= {"127.0.0.1", "::1"}
    assert addresses("[::1]:1234") in (["::1"], ["127.0.0.3"])  # a host without IPv6


def test_no_other_interface_answers():
    (held,) = open_sockets("127.0.0.1:1234")
    with held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", held.getsockname()[1]), 5)


@pytest.mark.parametrize("coordinator", [None, "203.0.113.9:1", "no-such-host.invalid:1", "0.0.0.0:1", "[::]:1"])
def test_of_a_coordinator_elsewhere_it_is_the_default_route(addresses, routes, coordinator):
    assert addresses(coordinator) == ["127.0.0.3"]


def test_a_name_for_the_loopback_is_not_where_others_come(addresses, routes, monkeypatch):
    """As Debian has it in /etc/hosts: the host's own name is 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0)) for name in ("127.0.1.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert addresses("node001:1234") == ["127.0.0.3"]


def test_without_a_route_it_is_the_loopback(addresses, monkeypatch):
    monkeypatch.setattr(interfaces, "_of_default_route", lambda: [])
    assert addresses(None) == ["127.0.0.1"]


def test_the_variable_decides(addresses, routes):
    assert addresses("127.0.0.2:1234", told="127.0.0.4") == ["127.0.0.4"]
    for wrong in ("203.0.113.9", "0.0.0.0", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"^TORCH_SHARD_HOST must be an address of the host .*, found {wrong}$"):
            addresses("127.0.0.2:1234", told=wrong)


def test_the_real_default_route_is_of_this_host():
    for name in interfaces._of_default_route():
        socket.create_server((name, 0), family=socket.AF_INET6 if ":" in name else socket.AF_INET).close()
