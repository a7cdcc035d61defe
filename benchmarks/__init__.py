"""Benchmarks: `python -m benchmarks.step`."""
