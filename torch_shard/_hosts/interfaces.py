"""Where process 0 listens: on the interface over which the other processes reach it, and on no other."""

import contextlib
import ipaddress
import os
import socket

from torch_shard._hosts.launchers import LOOPBACK

_TOLD = "TORCH_SHARD_HOST"
"""The variable that says on which of its addresses process 0 is to listen."""


def listen(coordinator: str | None) -> socket.socket:
    """Listen on a free port.

    Args:
        coordinator: `host:port` of JAX's coordinator, which is on this host; None if that is unknown.

    Returns:
        On the interface that `TORCH_SHARD_HOST` names, else the coordinator's, else that of the default route, else the
        loopback.

    Raises:
        ValueError: `TORCH_SHARD_HOST` is no address of this host.
    """
    told = os.environ.get(_TOLD)
    host = told or (coordinator or "").rpartition(":")[0].strip("[]")
    found = _bound(_resolved(host))
    if told and not found:
        raise ValueError(f"{_TOLD} must be an address of the host of process 0, or a name of one, found {told}")
    return found or _bound(_of_default_route()) or socket.create_server((LOOPBACK, 0))


def _resolved(host: str) -> list[str]:
    """The addresses of a host; without the loopback, unless that is meant: many hosts give it as their own."""
    if not host:
        return []
    found: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):
        found = [str(place[0]) for *_, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    with_loopback = host == "localhost" or host in found
    return [address for address in dict.fromkeys(found) if _is_one_interface(address, with_loopback)]


def _is_one_interface(address: str, with_loopback: bool) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not ip.is_unspecified and not ip.is_link_local and (with_loopback or not ip.is_loopback)


def _of_default_route() -> list[str]:
    found: list[str] = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # RFC 5737, 3849: nobody's
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as out:
            out.connect((far, 9))  # sends nothing, but chooses where it would leave from
            found.append(out.getsockname()[0])
    return found


def _bound(addresses: list[str]) -> socket.socket | None:
    """A socket for the first address that is this host's."""
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family)
    return None
