"""headrace in torch's own DataLoader: whole batches, and rows that torch collates.

python examples/torch_dataloader.py --steps 20
"""

import argparse
import itertools

import torch
from torch.utils.data import DataLoader

import headrace as hr


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", default="sample:prose", help="a source, such as jsonl:web/*.jsonl")
    args = parser.parse_args(words)
    data = hr.TextDataset(args.data, tokenizer="sample", seq_len=256, seed=7)

    # Whole batches: batch_size=None tells the DataLoader that they are batches already.
    batches = hr.TorchDataset(data, global_batch_size=8)
    whole = list(itertools.islice(DataLoader(batches, batch_size=None), args.steps))

    # Rows: the DataLoader puts 8 of them together. It gives up cu_seqlens and max_seqlen, which belong to a whole batch.
    rows = hr.TorchDataset(data, global_batch_size=8, batched=False)
    collated = list(itertools.islice(DataLoader(rows, batch_size=8), args.steps))

    print(f"a batch has {', '.join(whole[0])}")
    print(f"collated rows have {', '.join(collated[0])}")
    for a, b in zip(whole, collated, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)

    # The same without a DataLoader: hr.Loader is the one with all guarantees.
    with hr.Loader(data, global_batch_size=8) as loader:
        for _ in range(args.steps):
            next(loader)
        print(f"digest of the batches  {batches.loader.digest}")
        print(f"digest of the rows     {rows.loader.digest}")
        print(f"digest of hr.Loader    {loader.digest}")
        assert batches.loader.digest == rows.loader.digest == loader.digest
    batches.close()
    rows.close()


if __name__ == "__main__":
    main()
