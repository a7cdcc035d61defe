"""The parallel styles of transformers, by name: which dim of a parameter each splits, and which are nothing here.

Read from transformers 5.23: `distributed/tensor_parallel.py`, `expert_parallel.py` and `fsdp.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """One of `transformers.distributed.parallel_utils.ALL_PARALLEL_STYLES`.

    Attributes:
        dim: That it splits, from the end if it is negative; None where it splits none.
        pieces: Of that dim, each of which is split by itself: 2 where gate and up are one parameter.
        skips: The parameters that it leaves whole: "bias", those of that name; "vectors", those of one dim.
        note: What is made of its work on activations and gradients.
    """

    dim: int | None = None
    pieces: int = 1
    skips: str = ""
    note: str = ""

    def dim_of(self, parameter: str, num_dims: int) -> int | None:
        """The dim of a parameter that it splits, from 0."""
        skipped = (self.skips == "bias" and parameter == "bias") or (self.skips == "vectors" and num_dims == 1)
        if self.dim is None or skipped or num_dims == 0:
            return None
        dim = max(num_dims + self.dim, 0) if self.dim < 0 else self.dim  # of a vector, its only one
        return dim if dim < num_dims else None


_COLUMN, _ROW = Style(-2), Style(-1, skips="bias")
_PARTIAL = "nothing to do: no gradient is one device's part"
_OUTPUT = "nothing to do: no output is one device's part"

STYLES = {
    "colwise": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "colwise_rep": _COLUMN,
    "rowwise": _ROW,
    "rowwise_split_input": _ROW,
    "rowwise_rep": _ROW,
    "packed_colwise": Style(-2, pieces=2),
    "packed_rowwise": Style(-1, pieces=2, skips="vectors"),
    "embedding_rowwise": Style(0),
    "embedding_colwise": Style(1),
    "grouped_gemm": Style(0),
    "moe_tp_experts": Style(note="its parameters have rules of their own"),
    "ep_dispatch_experts": Style(note="its parameters have rules of their own"),
    "local_params": Style(note="its parameters have rules of their own"),
    "replicate": Style(note="whole"),
    "sequence_parallel": Style(note="what it takes and returns is split along the sequence"),
    "replicated_with_grad_allreduce": Style(note=_PARTIAL),
    "mla_kv_a_proj": Style(note=_PARTIAL),
    "all_reduce": Style(note=_OUTPUT),
    "moe_identity_expert": Style(note=_OUTPUT),
}
"""By name; `colwise_rep` and `rowwise_rep` are older names."""

FSDP_STYLES = {
    "free_full_weight": "free_full_weight",
    "keep_full_weight": "keep_full_weight, stored alike: XLA decides for how long it is gathered",
}
"""What is said of an entry that is split for storage alone."""
