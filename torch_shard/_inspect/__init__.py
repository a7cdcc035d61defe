"""What will happen and what happened: proof against torch, explanation of a capture, drawings of shardings."""
