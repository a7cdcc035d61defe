"""Functions across the border: a torch callable as a JAX function, JAX as torch, the jax_* adapters."""
