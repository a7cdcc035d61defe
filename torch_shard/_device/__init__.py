"""The torch device `jax`: eager tensors that are jax.Arrays, and how tensors, modules and batches get onto the mesh."""
