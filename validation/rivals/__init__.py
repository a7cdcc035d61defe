"""The rivals of the benchmarks: hand-written JAX, which must compute the same."""
