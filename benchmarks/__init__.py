"""Benchmarks against rivals: `python -m benchmarks`."""
