"""Studies of many models, operators and programs: what pages say is made and checked here, each by one command.

| command | what for | on two cores, roughly |
| --- | --- | --- |
| `python -m validation.zoo.report --write` | docs/proof.md: other packages' models (the extra `zoo`) | hours |
| `python -m validation.proofs.report --write` | docs/proof.md: models of the hub under every usual plan | 40 minutes |
| `python -m validation.hf_families.report --write` | docs/proof.md: plans of transformers | 10 minutes |
| `python -m validation.operators.coverage --write` | docs/proof.md: PyTorch's own samples | an hour |
| `python -m validation.fuzz --seeds 0:1000` | random programs against eager torch | 2 s a program |
| `python -m validation.lives --seeds 0:500` | random lives of runs against eager torch | 1 s a life |
| `python -m validation.hf_families.random_models --seeds 0:300` | random small models of transformers | 5 s a model |
| `pytest validation/operators/test_modules.py` | modules on a mesh and in `jax_shard_map` | minutes |
| `pytest validation/hf_families` | shards of most families of transformers, adapters with magnitudes | 2 minutes |
| `pytest validation/rivals` | JAX by hand, of the benchmarks and of parallel layers, beside torch and ours | minutes |
| `pytest validation/reports` | wrong numbers that users have reported of other libraries | 5 minutes |
| `pytest validation/kills` | runs that are killed twenty times | 7 minutes |

`pytest validation/zoo`, or another of these folders, runs the tests of a study, and its rows as tests.
"""
