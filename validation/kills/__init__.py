"""Runs that are killed twenty times, by one process and by two: `pytest validation/kills` (7 minutes on two cores)."""
