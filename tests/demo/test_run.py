"""Settings of the demo."""

from torch_shard._demo import run as running
from torch_shard._demo.run import Settings


def test_mesh_by_default_takes_all_devices(monkeypatch):
    assert dict(running.choose_mesh(None).shape) == {"batch": 4, "model": 2}
    monkeypatch.setattr("jax.device_count", lambda: 3)
    assert dict(running.choose_mesh(None).shape) == {"batch": 3, "model": 1}


def test_batch_is_rounded_up_to_the_mesh(corpus, tmp_path):
    settings = Settings(steps=1, out=tmp_path, num_layers=1, axis_sizes={"batch": 3, "model": 2})
    assert running.Run(settings, corpus).batch_size == 18
