"""Loaders of real gloo ranks: a world size that does not divide the lanes, to the end of the data, and a device mesh."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import headrace as hr
from headrace.metrics import default_meter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_server import fork_ranks

RANKS, LANES, BATCH = 4, 6, 8


def dataset(folder: Path) -> hr.TextDataset:
    return hr.TextDataset(
        [f"jsonl:{folder}/a.jsonl"], seq_len=32, seed=3, lanes=LANES, window_blocks=2, cache=folder / "cache"
    )


def walk(loader: hr.Loader) -> list[tuple[int, list[int]]]:
    return [
        (int(g), ids.tolist())
        for batch in loader
        for g, ids in zip(batch["sample_index"], batch["input_ids"], strict=True)
    ]


def one_rank(folder: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=90)
    )  # fmt: skip
    found = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, options in (("ranks", {}), ("mesh", {"mesh": mesh, "dp_dims": ("dp",)})):
        loader = hr.Loader(dataset(folder), global_batch_size=BATCH, tokenizer_workers=1, **options)
        next(loader)
        saved = loader.gather_state()
        again = hr.Loader(dataset(folder), global_batch_size=BATCH, tokenizer_workers=1, **options)
        again.load_state_dict(saved)
        found[name] = {"saved": saved, "rows": walk(again), "ended": again.gather_state()["body"]["digest"]}
    found["waited"] = default_meter().totals()["wait/ranks.gather/count"]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    sys.exit(fork_ranks(RANKS, lambda rank: one_rank(folder, rank)))


def test_ranks_that_share_lanes_deliver_the_order_of_one_rank_to_its_end(tmp_path, warm):
    rows = [{"text": f"document {i} " + "word " * (i % 23)} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = hr.Loader(dataset(tmp_path), global_batch_size=BATCH, tokenizer_workers=0)
    next(alone)
    saved, expected = alone.state_dict(), walk(alone)
    done = warm.run([sys.executable, __file__, str(tmp_path)], timeout=100)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(RANKS)]
    assert all(rank["waited"] >= 4 for rank in found), "the ranks wait for each other by a name"
    for name, ranks in (("ranks", found), ("mesh", found[::2])):
        assert all(rank[name]["saved"] == saved for rank in found), "the states of all ranks are the state of one"
        delivered = sorted(row for rank in ranks for row in rank[name]["rows"])
        assert delivered == [list(row) for row in expected]
        assert {rank[name]["ended"] for rank in found} == {alone.digest}
    for dp in (0, 1):  # ranks of one dp coordinate
        assert found[2 * dp]["mesh"]["rows"] == found[2 * dp + 1]["mesh"]["rows"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
