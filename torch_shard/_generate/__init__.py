"""Text from decoders of transformers: a static cache of keys and values, one prefill and one loop, both compiled."""

from torch_shard._generate.generate import generate
