"""What ranks send each other on request: their states."""

from __future__ import annotations

import json
from typing import Any

from headrace.metrics import Wait


def gather_json(value: Any) -> list[Any]:
    """The JSON value of every rank, in rank order. Collective. Bytes and lengths only: nothing is unpickled."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    raw = torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    with Wait("ranks.gather"):
        dist.all_gather(sizes, torch.tensor([raw.numel()], dtype=torch.int64, device=device))
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw
    gathered = [torch.empty_like(padded) for _ in sizes]
    with Wait("ranks.gather"):
        dist.all_gather(gathered, padded)
    return [json.loads(bytes(g[: int(s)].cpu().numpy())) for g, s in zip(gathered, sizes, strict=True)]
