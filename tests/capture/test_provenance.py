"""Which files count as the user's."""

import pathlib

import jax
import numpy as np
import pytest
import torch

import torch_shard
from torch_shard._capture.provenance import is_user_file


@pytest.mark.parametrize("library", [torch, jax, np, torch_shard])
def test_what_we_stand_on_is_not_the_user(library):
    folder = pathlib.Path(library.__file__).parent
    assert not is_user_file(str(folder / "nn" / "functional.py"))


@pytest.mark.parametrize("name", ["torchvision", "torch_geometric", "torchdiffeq", "jaxtyping", "numpyro"])
def test_libraries_whose_names_begin_alike_are_user_code(name):
    assert is_user_file(str(pathlib.Path(torch.__file__).parent.parent / name / "models.py"))


def test_a_frame_without_a_file_is_not_the_user():
    assert not is_user_file("<frozen importlib._bootstrap>")
