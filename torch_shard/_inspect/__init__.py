"""Previews and proofs: comparison with torch, explanation of a capture, the first value that is not finite."""

from torch_shard._inspect.explain import Explanation, explain_capture
from torch_shard._inspect.find_nan import NanReport, find_nan, read_bad_batch, replay, save_bad_batch
from torch_shard._inspect.prove import Proof, Proofs, prove
from torch_shard._inspect.targets import find_proved, find_step, read_file
from torch_shard._inspect.training import compare_with_torch
