"""The main job of torch_shard: train a small GPT on a mesh, and prove that the numbers are torch's."""
