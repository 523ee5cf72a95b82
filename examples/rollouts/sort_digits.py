"""A whole RL run in one file: a GPT of 60,000 weights learns to sort four digits from nothing but rewards.

    python examples/rollouts/sort_digits.py --out /tmp/sort --steps 100
    ^C, kill -9, and the same line again: it goes on with the step that was under way
    headrace report /tmp/sort; headrace inspect /tmp/sort

    task ──► RolloutScheduler ──► engine (samples from the policy) ──► reward ──► RolloutPipeline ──► batch file ──► trainer
             who is asked                                                        samples, advantages              policy + 1

The engine and the trainer share the process here, with a policy lag of 0. With vLLM behind a URL, `play` is an HTTP call whose
reply goes through headrace.rollouts.step_from_reply, the trainer is a torchrun job with a SpoolReceiver a rank, and nothing else changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
from pathlib import Path

import numpy as np
import torch

from headrace.files import publish
from headrace.metrics import JsonlSink
from headrace.rollouts import (
    AdvantageConfig,
    EnvPolicy,
    GroupBook,
    RolloutPipeline,
    RolloutScheduler,
    SpoolReceiver,
    SpoolSender,
    ZeroAdvantageFilter,
    batch_path,
)
from headrace.train.gpt import GPT, GPTConfig, init_parameters
from headrace.train.rl import EnvWatch, policy_terms

DIGITS, SEPARATOR, VOCABULARY = 4, 10, 11
MEMBERS = 16


class Policy:
    """The model, its optimiser and how many steps it has learnt from. Saved whole or not at all."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.step = path, 0
        self.model = GPT(GPTConfig(vocab_size=VOCABULARY, seq_len=64, layers=2, heads=2, width=48))
        init_parameters(self.model, seed)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0)
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.step = saved["step"]
            self.model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])

    def save(self) -> None:
        whole = io.BytesIO()
        state = {"step": self.step, "model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        torch.save(state, whole)
        publish(self.path, whole.getvalue(), replace=True)

    @torch.inference_mode()
    def complete(self, prompts: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their logprobs. `draws` are uniform numbers of each request's own, so no answer depends on its neighbours' luck."""
        ids, logprobs = torch.from_numpy(prompts), []
        for at in range(draws.shape[1]):
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            said = self.model(ids, positions)[:, -1].double().log_softmax(-1)
            token = (said.exp().cumsum(-1) < torch.from_numpy(draws[:, at : at + 1])).sum(-1, keepdim=True)
            token = token.clamp(max=VOCABULARY - 1)
            ids = torch.cat([ids, token], 1)
            logprobs.append(said.gather(1, token))
        return ids[:, prompts.shape[1] :].numpy(), torch.cat(logprobs, 1).float().numpy()

    def learn(self, batch) -> dict[str, float]:
        """One optimiser step from one batch: the policy loss by the tokens of all its micro batches."""
        watch, micros = EnvWatch(), list(batch.micro_batches(0))
        tokens = max(1, sum(int(m["mask"].sum()) for m in micros))
        for micro in micros:
            ids = torch.from_numpy(micro["ids"].astype(np.int64))[None]
            said = self.model(ids, torch.from_numpy(micro["positions"].astype(np.int64))[None])[0].log_softmax(-1)
            own = torch.cat([said.new_zeros(1), said[:-1].gather(1, ids[0, 1:, None])[:, 0]])
            terms = policy_terms(own, micro)
            spread = -(said.exp() * said).sum(-1)
            watch.add(micro, terms, torch.cat([said.new_zeros(1), spread[:-1]]))
            (terms.loss_sum / tokens).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step = batch.step + 1
        self.save()
        return watch.metrics()


class Engine:
    """Answers whatever has been asked since it last looked, in one batch."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.seed = policy, seed
        self._asked: dict[tuple[int, int, int], tuple[np.ndarray, asyncio.Future]] = {}
        self._at_work: asyncio.Task | None = None

    def complete(self, prompt: np.ndarray, key: tuple[int, int, int]) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        self._asked[key] = (prompt, future)
        if self._at_work is None or self._at_work.done():
            self._at_work = asyncio.create_task(self._work())
        return future

    async def _work(self) -> None:
        while self._asked:
            await asyncio.sleep(0)
            asked, self._asked = dict(sorted(self._asked.items())), {}
            draws = np.array([np.random.default_rng([self.seed, *key]).random(DIGITS) for key in asked])
            prompts = np.array([prompt for prompt, _ in asked.values()])
            ids, logprobs = await asyncio.to_thread(self.policy.complete, prompts, draws)
            for (_, future), said, sure in zip(asked.values(), ids, logprobs, strict=True):
                if not future.cancelled():
                    future.set_result((said, sure))


async def train(out: Path, steps: int, tasks: int, seed: int, told_every: int) -> None:
    policy = Policy(out / "policy.pt", seed)
    engine = Engine(policy, seed)
    exact: list[bool] = []

    async def play(request):
        digits = np.random.default_rng([seed, request.task]).integers(0, 10, DIGITS)
        prompt = np.append(digits, SEPARATOR)
        said, logprobs = await engine.complete(prompt, (request.task, request.member, request.attempt))
        right = said == np.sort(digits)
        exact.append(bool(right.all()))
        tokens = {
            "prompt_ids": prompt, "prompt_mask": np.zeros(DIGITS + 1, np.uint8), "completion_ids": said,
            "completion_mask": np.ones(DIGITS, np.uint8), "completion_logprobs": logprobs,
        }  # fmt: skip
        return {
            "example_id": request.task, "env_name": "sort", "reward": float(right.mean()), "trajectory": [{"tokens": tokens}],
        }  # fmt: skip

    async with SpoolSender(out) as sender:
        with (
            contextlib.closing(JsonlSink(out / "metrics.jsonl")) as sink,
            SpoolReceiver(out, deadline=60.0) as receiver,
        ):

            async def learn() -> dict[str, float]:
                batch = await asyncio.to_thread(receiver.receive)
                told = await asyncio.to_thread(policy.learn, batch) if batch.step >= policy.step else {}
                receiver.ack(batch.step)
                return told

            # A batch that a killed run had published and not learnt from, or learnt from and not acknowledged.
            while receiver.next_step < sender.next_step and batch_path(sender.queue, receiver.next_step).exists():
                await learn()
            book = GroupBook([EnvPolicy(env_name="sort", group_size=MEMBERS)], groups_per_step=tasks)
            options = {
                "advantage": AdvantageConfig(),
                "filters": [ZeroAdvantageFilter()],
                "first_step": sender.next_step,
                "sinks": [sink],
            }
            async with RolloutPipeline(sender.queue, seq_len=32 * (2 * DIGITS + 1), **options) as pipeline:
                scheduler = RolloutScheduler(
                    book,
                    pipeline,
                    sender,
                    environments={"sort": play},
                    env_of=lambda task: "sort",
                    concurrency=tasks * MEMBERS,
                )
                scheduler.policy_is(sender.next_step)
                async for report in scheduler.run(steps, first=sender.next_step):
                    told = await learn() if report.path is not None else {}
                    scheduler.policy_is(report.step + 1)
                    if (report.step + 1) % told_every == 0 or report.step + 1 == steps:
                        print(
                            f"step {report.step + 1}: reward {report.metrics['reward/sort/mean']:.3f}, sorted {np.mean(exact):.2f}, "
                            f"entropy {told.get('entropy/sort/mean', 0.0):.2f}, mismatch KL {told.get('mismatch_kl/sort/mean', 0.0):.1e}",
                            flush=True,
                        )
                    exact.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; one that is there is continued")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=32, help="tasks of a step; each is tried 16 times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--told-every", type=int, default=10, help="steps between two lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(train(args.out, args.steps, args.tasks, args.seed, args.told_every))


if __name__ == "__main__":
    main()
