"""Values as bytes and back: what is the same, what is refused, and that nothing is executed."""

import collections
import contextlib
import math
import os
import pickle

import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_shard._hosts.peers import pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.tuples(st.integers(), st.binary()), inner) | st.tuples(inner)
    ),
    max_leaves=20,
)


FEW = settings(max_examples=30, deadline=None)  # drawing nested values takes longer than packing them


@FEW
@given(PLAIN)
def test_values_come_back_as_they_were(value):
    found = unpack(pack(value))
    assert found == value
    assert repr(found) == repr(value)  # types too


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data):
    with contextlib.suppress(ValueError):
        unpack(data)


@FEW
@given(PLAIN, st.integers(min_value=0), st.integers(min_value=0, max_value=255))
def test_a_flawed_value_is_a_value_or_refused(value, place, byte):
    data = bytearray(pack(value))
    data[place % len(data)] = byte
    for flawed in (bytes(data), bytes(data[: place % len(data)])):
        with contextlib.suppress(ValueError):
            unpack(flawed)


ARRAYS = [
    np.arange(6).astype(dtype).reshape(2, 3)
    for dtype in (np.float32, np.float64, np.int8, np.uint64, np.complex64, np.bool_, ml_dtypes.bfloat16, np.float16)
]


@pytest.mark.parametrize("array", [*ARRAYS, np.zeros((0, 3), np.int32), np.array(3.5), np.arange(9).reshape(3, 3).T])
def test_arrays_keep_dtype_shape_and_bits(array):
    found = unpack(pack([array, array]))[1]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    found[...] = 0  # its own, to write to
    assert type(unpack(pack(array.dtype.type(1)))) is array.dtype.type


TENSORS = [
    torch.arange(6).reshape(2, 3).to(dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
]


@pytest.mark.parametrize("tensor", [*TENSORS, torch.zeros(0, 3), torch.tensor(3), torch.randn(3, 4).T])
def test_tensors_keep_dtype_shape_and_bits(tensor):
    found = unpack(pack({"w": tensor}))["w"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(
        found.float() if found.is_floating_point() else found, tensor.float() if tensor.is_floating_point() else tensor
    )


def test_a_parameter_and_a_conjugate_are_their_values():
    weight = torch.nn.Parameter(torch.ones(2))
    found = unpack(pack(weight))
    assert type(found) is torch.Tensor
    assert torch.equal(found, weight.detach())
    assert unpack(pack(torch.tensor([1 + 2j]).conj())).tolist() == [1 - 2j]


def test_not_a_number_comes_back():
    assert math.isnan(unpack(pack(float("nan"))))
    assert unpack(pack(-math.inf)) == -math.inf


Point = collections.namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (print, "builtin_function_or_method"),
        (Point(1), "Point"),
        ({"a": [object()]}, "object"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (np.array([print]), "ndarray"),
        (np.array(["a"]), "ndarray"),
        (torch.ones(2, device="meta"), "Tensor"),
        (torch.eye(2).to_sparse(), "Tensor"),
    ],
)
def test_what_is_not_data_is_refused(value, name):
    with pytest.raises(TypeError, match=f"^{name} cannot be sent to another process: only None, .* and dicts$"):
        pack(value)


def test_what_is_nested_too_deeply_is_refused():
    nested = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TypeError, match="nested too deeply"):
        pack(nested)


class Command:
    def __reduce__(self):
        return os.abort, ()


def packed(*parts):
    return msgpack.packb(msgpack.ExtType(0, msgpack.packb(parts)))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Command()),
        packed("array", "O", [1], bytes(8)),
        packed("array", "float32", [-1, -1], bytes(8)),
        packed("array", "float32", [1 << 40, 1 << 40], bytes(8)),
        packed("tensor", "_C", [1], bytes(8)),
        packed("tensor", "float32", [3], bytes(8)),
        packed("command", "rm"),
        packed(),
        msgpack.packb(["8 bytes!"])[:-1],
        msgpack.packb("8 bytes!") + b"!",
        msgpack.packb({}).replace(b"\x80", b"\x81\x90\x01"),
        b"\x91" * 100_000,
        packed("int", "1" * 10_000),
        packed("tuple", *[b"\xdd\xff\xff\xff\xff"])[:-2],
        b"\xdd\xff\xff\xff\xff",
        b"",
    ],
)
def test_bytes_that_are_no_value_are_refused(data):
    with pytest.raises(ValueError, match="the bytes are not a packed value"):
        unpack(data)
