"""The entries of a module by name: what it holds, what is tied, and how to run it with other values."""

# pyright: reportUnusedImport=false

from torch_shard._entries.entries import (
    OF_EVERY_MODULE,
    Holdings,
    LossFn,
    TensorPlaces,
    entry_places,
    gradient_hooks,
    group_ties,
    holdings,
    marked_like,
    memory_span,
    named_tensors,
    place_of,
    put_into_scripted,
    refuse_hooks,
    refuse_load_hooks,
    shared_memory,
    shared_storage,
    tied_names,
    unsaved_buffers,
    with_values,
)
