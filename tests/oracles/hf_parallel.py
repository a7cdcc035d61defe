"""What tensor parallelism of transformers itself gives each process: `python -m tests.oracles.hf_parallel FOLDER NUM`.

FOLDER holds models as `save_pretrained` writes them; next to each comes `<model>.<rank>.npz` with the local shards.
Those whose name ends in "-ep" distribute their experts too; `<model>.json` has rules to put in the place of its own.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import traceback
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

LOGITS = "(logits)"
"""Their name beside those of parameters."""


def local_shards(folder: pathlib.Path, num: int, *, timeout_s: float = 300) -> None:
    """Load every model of a folder in so many processes, and write what each of them holds."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": str(num)}
    command = [sys.executable, "-m", "tests.oracles.hf_parallel", str(folder), str(num)]
    done = subprocess.run(command, env={**os.environ, **where}, timeout=timeout_s, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def _work(folder: pathlib.Path, num: int) -> None:
    """One process, whose rank is in its environment."""
    import transformers
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        config = transformers.AutoConfig.from_pretrained(path)
        cls = getattr(transformers, config.architectures[0])
        experts = {"ep_size": num, "ep_implementation": "all_reduce"} if path.name.endswith("-ep") else {}
        rules = path.with_suffix(".json")
        tp_plan = json.loads(rules.read_text()) if rules.exists() else None
        asked = DistributedConfig(tp_size=num, tp_plan=tp_plan, **experts)
        model = cls.from_pretrained(path, distributed_config=asked)
        shards = {name: _local(p) for name, p in model.named_parameters(remove_duplicate=False)}
        np.savez(path.with_suffix(f".{rank}.npz"), **shards | {LOGITS: logits_of(model)})
    torch.distributed.barrier()  # the first process keeps what the others ask when they form groups
    torch.distributed.destroy_process_group()


def logits_of(model: Any) -> np.ndarray:
    """Of some tokens, (2, 8, vocabulary)."""
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19).reshape(2, 8)).logits.numpy()


def _local(parameter: torch.Tensor) -> np.ndarray:
    held = parameter.detach()
    return (held.to_local() if isinstance(held, DTensor) else held).float().numpy()


def main() -> None:
    """Import once, then fork."""
    import transformers.distributed  # noqa: F401

    folder, num = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    rank = next((rank for rank in range(num) if os.fork() == 0), None)
    if rank is None:
        failed = [os.wait()[1] for _ in range(num)]
        os._exit(1 if any(failed) else 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        _work(folder, num)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
