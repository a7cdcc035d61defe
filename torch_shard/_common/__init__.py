"""Helpers for all packages, imported file by file; this file is empty, so that packages without JAX stay so."""
