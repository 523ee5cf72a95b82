"""headrace under the Hugging Face Trainer: train, stop, resume from its checkpoint; the same data and the same losses.

pip install transformers accelerate
python examples/hf_trainer.py --steps 12
"""

import argparse
import sys
import tempfile
from pathlib import Path

import headrace as hr

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install transformers accelerate")


def new_trainer(spec: str, steps: int, folder: Path) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=steps // 2, per_device_train_batch_size=4,
        learning_rate=1e-3, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, seed=7,
    )  # fmt: skip
    data = hr.TextDataset(spec, tokenizer="sample", seq_len=64, seed=7)
    dataset = hr.TorchDataset(data, global_batch_size=4 * args.world_size, labels="hf")  # models shift by themselves
    set_seed(7)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    config = GPT2Config(**size, vocab_size=data.vocab_size, bos_token_id=None, eos_token_id=None)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=dataset)
    hr.attach_to_trainer(trainer)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--data", default="sample:prose", help="a source, such as jsonl:web/*.jsonl")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        straight = new_trainer(args.data, args.steps, Path(folder))
        straight.train()
        resumed = new_trainer(args.data, args.steps, Path(folder))
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{args.steps // 2}")
    print(f"loss at step {args.steps}: straight through {losses(straight)[-1]}, after a resume {losses(resumed)[-1]}")
    print(f"digest straight through  {straight.train_dataset.loader.digest}")
    print(f"digest after the resume  {resumed.train_dataset.loader.digest}")
    assert losses(straight) == losses(resumed)
    assert straight.train_dataset.loader.digest == resumed.train_dataset.loader.digest


if __name__ == "__main__":
    main()
