"""How often a supervisor has started a command again: said to the command by its environment."""

RESTARTS = "TORCH_SHARD_RESTART_COUNT"
"""The variable of `torch-shard run`: processes of another life meet on another port (`torch_shard._hosts`)."""
