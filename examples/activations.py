"""Which directions does a layer use? The quickstart's model over the quickstart's data, its activations as one covariance.

python examples/activations.py --steps 20
"""

import argparse

import headrace as hr
from headrace.train.gpt import GPT, GPTConfig, init_parameters


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", default="sample:prose", help="a source, such as jsonl:web/*.jsonl")
    parser.add_argument("--module", default="blocks.1")
    args = parser.parse_args(words)

    data = hr.TextDataset(args.data, tokenizer="sample", seq_len=256, seed=7)
    model = GPT(GPTConfig.preset("gpt-tiny", vocab_size=data.vocab_size, seq_len=256))
    init_parameters(model, seed=7)  # or load a checkpoint of your own
    with hr.Loader(data, global_batch_size=8) as loader:
        result = hr.reduce.activations(
            model, loader, module=args.module, steps=args.steps, keep=lambda batch: batch["labels"] != -100
        )
    share = result.pca(8).share
    print(f"{result.n_rows:,} rows of {result.columns.width} activations, sha256 {result.sha256[:16]}…")
    print("variance along the first 8 components: " + " ".join(f"{s:.1%}" for s in share))


if __name__ == "__main__":
    main()
