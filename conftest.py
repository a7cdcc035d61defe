"""Eight CPU devices stand for a pod; nothing may touch a JAX backend before this file has run."""

import os

import jax

jax.config.update("jax_num_cpu_devices", 8)
# XLA compiles each program on all cores by default; here every core has a worker that compiles its own.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1".strip()
