"""Where process 0 listens: on one interface, never on all."""

import ipaddress
import socket

import pytest

from torch_shard._hosts import session
from torch_shard._hosts.session import address_towards, listen


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
def ways(monkeypatch):
    """The addresses of this host on the ways to others, by name; a default route from one that is here."""
    found = dict.fromkeys(session._FAR, "127.0.0.3")
    monkeypatch.setattr(session, "address_towards", lambda host: found.get(host) or address_towards(host))
    # What stands for an interface here has an address of the loopback.
    monkeypatch.setattr(session, "_is_loopback", lambda found: found in ("127.0.0.1", "127.0.1.1", "::1"))
    return found


@pytest.mark.parametrize("coordinator", ["127.0.0.2:1234", "localhost:1234", "[::1]:1234"])
def test_of_a_coordinator_on_the_loopback_it_is_that(address, coordinator):
    assert address(coordinator) == "127.0.0.1"


def test_no_other_interface_answers():
    with listen("127.0.0.1:1234") as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", held.getsockname()[1]), 5)


def test_it_is_the_interface_of_the_way_to_the_coordinator(address, ways):
    ways["node001"] = "127.0.0.2"
    assert address("node001:1234") == "127.0.0.2"


@pytest.mark.parametrize("coordinator", [None, "no-such-host.invalid:1", "0.0.0.0:1", "[::]:1"])
def test_without_such_a_way_it_is_the_default_route(address, ways, coordinator):
    assert address(coordinator) == "127.0.0.3"


def test_a_name_for_the_loopback_is_not_where_others_come(address, ways):
    """As Debian has it in /etc/hosts: the host's own name is 127.0.1.1."""
    ways["node001"] = "127.0.1.1"
    assert address("node001:1234") == "127.0.0.3"


def test_without_a_route_it_is_the_loopback(address, monkeypatch):
    monkeypatch.setattr(session, "address_towards", lambda host: None)
    assert address(None) == "127.0.0.1"


def test_the_variable_decides(address):
    assert address("127.0.0.2:1234", told="127.0.0.4") == "127.0.0.4"
    for wrong in ("203.0.113.9", "0.0.0.0", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"^TORCH_SHARD_HOST must be an address of the host .*, found {wrong}$"):
            address("127.0.0.2:1234", told=wrong)


def test_the_address_on_a_way_is_of_this_host():
    for name in filter(None, map(address_towards, ("127.0.0.1", *session._FAR))):
        socket.create_server((name, 0), family=socket.AF_INET6 if ":" in name else socket.AF_INET).close()
