import jax

jax.config.update("jax_num_cpu_devices", 8)  # simulate a pod; leave this out on real devices

import optax
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
batch = (torch.randn(32, 64), torch.randint(0, 10, (32,)))


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


mesh = ts.make_mesh(batch=4, model=2)
plan = ts.ShardingPlan({"0.weight": P("model"), "0.bias": P("model"), "3.weight": P(None, "model")}, default=P())
everywhere = ts.ShardingPlan({}, default=P())  # all of it on every device
