"""The plain loop: stop halfway, go on in a fresh loader, and see that the data is the same.

python examples/plain_loop.py --steps 20
"""

import argparse
import json

import headrace as hr


def new_loader(spec: str) -> hr.Loader:
    data = hr.TextDataset(spec, tokenizer="sample", seq_len=256, seed=7)
    return hr.Loader(data, global_batch_size=8)


def train(loader: hr.Loader, until: int) -> None:
    """Where your model's step goes."""
    while loader.step < until:
        batch = next(loader)
        assert batch["input_ids"].shape == batch["labels"].shape == (8, 256)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", default="sample:prose", help="a source, such as jsonl:web/*.jsonl")
    args = parser.parse_args(words)

    with new_loader(args.data) as straight:
        train(straight, args.steps)
        print(straight.report())

    with new_loader(args.data) as first:
        train(first, args.steps // 2)
        saved = json.dumps(first.state_dict())  # small, plain JSON: put it into your checkpoint

    with new_loader(args.data) as second:
        second.load_state_dict(json.loads(saved))
        train(second, args.steps)

    print(f"stopped at step {args.steps // 2} with a state of {len(saved):,} bytes")
    print(f"digest straight through  {straight.digest}")
    print(f"digest after the resume  {second.digest}")
    assert straight.digest == second.digest


if __name__ == "__main__":
    main()
