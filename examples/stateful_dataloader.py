"""headrace in torchdata's StatefulDataLoader: its state_dict() in the middle of an epoch, and an exact resume.

pip install torchdata
python examples/stateful_dataloader.py --steps 20
"""

import argparse
import itertools
import json
import sys

import headrace as hr

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    sys.exit("this example needs torchdata: pip install torchdata")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", default="sample:prose", help="a source, such as jsonl:web/*.jsonl")
    args = parser.parse_args(words)
    data = hr.TextDataset(args.data, tokenizer="sample", seq_len=256, seed=7)
    half = args.steps // 2

    def new() -> tuple[hr.TorchDataset, StatefulDataLoader]:
        dataset = hr.TorchDataset(data, global_batch_size=8)
        return dataset, StatefulDataLoader(dataset, batch_size=None)

    straight, loader = new()
    for _ in itertools.islice(loader, args.steps):
        ...  # your model's step

    stopped, loader = new()
    for _ in itertools.islice(loader, half):
        ...
    saved = json.dumps(loader.state_dict())

    resumed, loader = new()
    loader.load_state_dict(json.loads(saved))
    for _ in itertools.islice(loader, args.steps - half):
        ...

    print(f"stopped at step {half} with a state of {len(saved):,} bytes")
    print(f"digest straight through  {straight.loader.digest}")
    print(f"digest after the resume  {resumed.loader.digest}")
    assert straight.loader.digest == resumed.loader.digest
    for dataset in (straight, stopped, resumed):
        dataset.close()


if __name__ == "__main__":
    main()
