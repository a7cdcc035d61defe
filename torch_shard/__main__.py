"""`python -m torch_shard`: the command `torch-shard`."""

from torch_shard.cli import main

if __name__ == "__main__":
    main()
