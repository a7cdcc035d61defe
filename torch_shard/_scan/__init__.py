"""Repeated layers, proved to be one program, run as one lax.scan."""
