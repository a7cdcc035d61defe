"""How near `ts.tune` is to TPU's compiler: `pytest validation/tuning` (10 minutes on two cores)."""
