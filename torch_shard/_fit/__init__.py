"""The loop: data from any position, progress, metrics, bad steps, signals, resume."""
