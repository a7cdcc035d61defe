"""State and weights on disk: checkpoints, safetensors, torch files."""
