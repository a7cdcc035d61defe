"""Eight CPU devices stand for a pod; nothing may touch a JAX backend before this file has run."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
