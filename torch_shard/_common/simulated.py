"""Devices that the CPU simulates: how many, and what they compute is waited for."""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import os

import jax
from jax.core import Tracer


def simulate_devices(num: int) -> None:
    """Let JAX's CPU backend show so many devices, unless the user chose a number.

    The number is read when that backend starts; where JAX sees accelerators it computes on those, whatever the number.
    """
    by_flag = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.values["jax_num_cpu_devices"] == -1 and not by_flag:
        jax.config.update("jax_num_cpu_devices", num)


def wait_if_simulated(array: jax.Array) -> jax.Array:
    """Wait for an array of several devices that the CPU simulates, and only there; a value in a trace stays as it is.

    XLA's CPU client has one pool of threads, as many as devices or cores, from which it launches programs as well as
    runs them. With 32 programs in flight on a device, a launch waits in one of those threads; if the program that it
    waits for has none yet, nothing goes on, and XLA ends the process ("rendezvous ... Termination timeout"). The
    devices share the host's cores, so nothing is lost.
    """
    if not isinstance(array, Tracer):
        devices = array.sharding.addressable_devices
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            array.block_until_ready()
    return array
