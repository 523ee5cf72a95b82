"""The task of an RL run, from its config to its summary: rollouts, batches, weights, evaluation.

    tasks ─► RolloutScheduler ─► environments ─► engine (version step − lag) ─► arrival log ─► RolloutPipeline ─► batch file ─► PolicyTrainer ─► version + 1

A rollout is a function of (seed, environment, task, member, attempt, version), and a batch is its rollouts in the order of their tasks. So step n is the
same step after any number of kills, at any lag. A checkpoint holds the policy, its optimiser and the `lag` versions
before it; the arrival log holds every rollout that finished since. A resumed run reads both and requests only the missing rollouts.

Rank 0 runs the event loop, the engine and the environments in a thread beside the trainer (orchestrator.py). Under torchrun the other ranks read its batches, and all
ranks add up their gradients.

The run folder of an RL run:

    config.toml  run.json  journal.jsonl  checkpoints/  summary.json  run.lock        as of every run (folder.py)
    metrics.jsonl         one line every run.log_every steps (1 unless given), flat keys. `step` counts steps taken, from 1. A step that is trained again after a kill has a second line: the later wins
        step, time, seconds, tokens_per_second, rollouts/{count,samples,tokens,recorded,late,split_samples}
        reward/<all|env>/{mean,std,max,min}   also completion_length, turns, is_truncated, error; solve_all/<all|env>, solve_none/<all|env>
        eval/<all|env>/greedy, eval/<all|env>/pass_at_k, eval/<all|env>/reward, eval/failed            every eval.every steps
        staleness/{mean,max}  rollouts/failed/<reason>  rollouts/refused/<cause>  filter/<name>
        event_loop_lag/{min,mean,median,p90,p99,max}   phase/rollouts.<name>/seconds   wait/<name>/seconds
        train/{loss,grad_norm,lr,tokens}   entropy/<all|env>/{mean,std,max}   mismatch_kl/<all|env>/{mean,std,max}
    answers.jsonl         three held-out tasks at every evaluation: step, env, task, prompt, answer, reward; those of step 0 are the "before"
    journal.jsonl         events: started, resumed, saved, weights (version, where), completed, stopped; each with time and step
    arrivals/step_<n, 12 digits>.log      every rollout and failure of batch n as it came (rollouts/arrival_log.py: `read_arrivals(path)` yields Arrival)
    batches/step_<n, 12 digits>.safetensors   training batches that no checkpoint covers yet (rollouts/batch_files.py)
    initial_policy.safetensors            the weights that the run began with, where policy.model names a run or a model of transformers
    weights/v<version, 6 digits>/         versions for engines that load files, with their probe (rollouts/weights.py)

Batches are numbered from 0: batch n makes step n + 1, and is sampled by version max(0, n − lag), the policy after so many steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import xxhash

from headrace.errors import ConfigError, CursorMismatch
from headrace.files import Container, open_container, sweep_temporaries, write_container
from headrace.loader.dataset import sample_tokenizer
from headrace.metrics import MetricSpec, Reduction, Wait, register
from headrace.rollouts.batch_files import TrainingBatch, batch_path, open_training_batch
from headrace.rollouts.engine import CharacterCodec, Codec
from headrace.rollouts.environments import load_environment
from headrace.rollouts.pipeline import StepReport
from headrace.runs.config.rl import RLConfig
from headrace.runs.folder import RunFolder
from headrace.runs.orchestrator import Orchestrator
from headrace.runs.run_loop import Run, RunSummary, StepOutcome, Task, TaskState, Watcher, run_task
from headrace.sources import cache_folder
from headrace.text import load_tokenizer

_REWARDS_KEPT = 10
_TRAIN, _SKIP, _WAIT, _END = 1, 2, 3, 0
_HEARTBEAT = 5.0
"""Seconds after which rank 0 tells the waiting ranks that it still waits for rollouts."""

register(
    MetricSpec("rollouts/count", Reduction.SUM, unit="rollouts", help="rollouts of the steps of an interval"),
    MetricSpec("rollouts/samples", Reduction.SUM, unit="samples", help="samples that were trained on"),
    MetricSpec("rollouts/tokens", Reduction.SUM, unit="tokens", help="tokens of those samples, prompts included"),
    MetricSpec("rollouts/failed/<reason>", Reduction.SUM, unit="rollouts", healthy=(0, 0), help="requests that came to nothing, by reason"),
    MetricSpec("rollouts/recorded", Reduction.SUM, unit="rollouts", help="rollouts taken from the arrival log in place of being asked for again"),
    MetricSpec("staleness/mean", Reduction.MAX, unit="versions", help="versions between the policy that sampled a step and the one that learns from it"),
    MetricSpec("staleness/max", Reduction.MAX, unit="versions", help="the largest of them in a step"),
    MetricSpec("eval/<env>/greedy", Reduction.MAX, healthy=(0, 1), help="share of held-out tasks that the most likely answer solves"),
    MetricSpec("eval/<env>/reward", Reduction.MAX, help="mean reward of the most likely answers to held-out tasks"),
    MetricSpec("eval/<env>/pass_at_k", Reduction.MAX, healthy=(0, 1), help="share of held-out tasks that one of eval.samples sampled answers solves"),
    MetricSpec("eval/failed", Reduction.SUM, unit="rollouts", healthy=(0, 0), help="held-out rollouts that came to nothing"),
    *(
        MetricSpec(f"{name}/<env>/{statistic}", Reduction.MAX, help=f"{statistic} of {what} over learnt tokens")
        for name, what in (("entropy", "the policy's entropy"), ("mismatch_kl", "the divergence between engine and trainer"))
        for statistic in ("mean", "std", "max")
    ),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RLSummary(RunSummary):
    """Summary of an RL run."""

    reward_first: float
    reward_last: float
    """Mean over the last 10 steps."""
    accuracy_first: float
    accuracy: float
    """Share of held-out tasks that the most likely answer solves, over all environments."""
    accuracies: dict[str, float]
    rollouts: int
    tokens: int
    failed: dict[str, int]
    """Requests that failed in this process, by reason."""
    recorded: int
    """Rollouts that this process took from the arrival log."""
    digest: str
    """Digest of the batches that were trained on, in their order."""
    decays: bool
    """Whether the learning rate falls towards the last step; a run with more steps then has another config."""

    @property
    def data_digest(self) -> str:
        return self.digest


def run_rl(folder: RunFolder, watcher: Watcher, *, accept: Collection[str] = ()) -> RLSummary:
    """Run or continue the RL run in `folder` until its last step, or until a signal stops it. Every rank calls this."""
    config = folder.config
    assert isinstance(config, RLConfig)
    return run_task(folder, watcher, lambda run: RLTask(run, config), accept=accept, device="cpu")


class RLTask(Task[RLSummary]):
    """Trains a policy on the rollouts that it makes itself."""

    kind = "rl"
    unit = "tok"
    rate_key = "tokens_per_second"
    amount_metric = "rollouts/tokens"
    wait = "rollouts.batch"
    exposed_waits = ("rollouts.batch",)

    def __init__(self, run: Run, config: RLConfig) -> None:
        self.run, self.config = run, config
        self.environments = {
            env.name: load_environment(
                env.spec, name=env.name, base=run.folder.base, seed=config.run.seed, max_tokens=env.max_tokens, temperature=env.temperature,
                options=env.options,
            )
            for env in config.env
        }  # fmt: skip
        from headrace.train.policy import PolicySettings, PolicyTrainer

        self.codec: Codec
        self.codec, shape, weights = self._opened_policy()
        own: dict[str, Any] = {"steps": config.run.steps, "seed": config.run.seed}
        settings = PolicySettings(**own, **{f.name: getattr(config.policy, f.name) for f in fields(PolicySettings) if f.name not in own})  # fmt: skip
        self.trainer = PolicyTrainer(settings, shape, rank=run.rank, world_size=run.world_size)
        if weights is not None:
            self.trainer.start_from(weights)
        self.trainer.freeze_reference()
        self.batches = run.folder.make_folder("batches")
        self.orchestrator: Orchestrator | None = None
        self.older: dict[int, dict[str, np.ndarray]] = {}
        """Weights of the `lag` versions before the policy as it is, by version."""
        self.rewards: deque[float] = deque(maxlen=_REWARDS_KEPT)
        self.reward_first = self.accuracy_first = math.nan
        self.accuracy: dict[str, float] = {}
        self.tokens = self.rollouts = self.recorded = self.digest = 0
        self.failed: Counter[str] = Counter()
        self._metrics: dict[str, Any] = {}

    def _opened_policy(self) -> tuple[Codec, Any, Mapping[str, np.ndarray] | None]:
        """The codec, the shape and the initial weights of the policy; None for random weights. Weights of another run or model are copied into the run's
        folder at its start: a resumed run needs them for its reference policy. Collective."""
        from headrace.train.gpt import PRESETS, GPTConfig
        from headrace.train.policy_models import HFConfig, TokenizerCodec

        policy, base = self.config.policy, self.run.folder.base
        if policy.model in PRESETS:
            codec = CharacterCodec(policy.alphabet)
            return codec, GPTConfig.preset(policy.model, vocab_size=codec.vocab_size, seq_len=policy.context), None
        path = self.run.folder.path / "initial_policy.safetensors"
        if policy.model.startswith("hf:"):
            shape = HFConfig(base / policy.model[3:])
            codec = TokenizerCodec(load_tokenizer(shape.folder / "tokenizer.json"))
            if self.run.is_lead and not path.exists():
                write_container(path, shape.weights(), {})
            self.run.gather(None)
            return codec, shape, open_container(path).arrays
        if not (base / policy.model / "config.toml").is_file():
            raise ConfigError(
                f'policy.model {policy.model!r}: expected one of {", ".join(sorted(PRESETS))}, the folder of a run, or "hf:FOLDER" as transformers saves a model'
            )
        earlier = RunFolder.reopen(base / policy.model)
        if self.run.is_lead and not path.exists():
            newest = _newest_checkpoint(earlier)
            arrays = {name[6:]: array for name, array in newest.arrays.items() if name.startswith("model/")}
            write_container(path, arrays, {"shape": newest.meta["trainer"]["model"]})
        self.run.gather(None)
        initial = open_container(path)
        shape = GPTConfig(**initial.meta["shape"])
        if shape.learned_positions and policy.context > shape.seq_len:
            raise ConfigError(
                f"policy.context {policy.context}: the model of {earlier.path} has {shape.seq_len} positions"
            )
        return _codec_of(earlier), shape, initial.arrays

    # ------------------------------------------------------------------------------------------ restore

    def restore(self, container: Container, step: int) -> Mapping[str, Any]:
        meta = container.meta["rl"]
        self._check_unchanged(container.meta["config_hash"], meta["environments"])
        for version in meta["versions"]:
            start = f"version/{version}/"
            self.older[int(version)] = {
                name.removeprefix(start): np.array(array) for name, array in container.arrays.items() if name.startswith(start)
            }  # fmt: skip
        self.reward_first, self.accuracy_first = (
            math.nan if meta[n] is None else meta[n] for n in ("reward_first", "accuracy_first")
        )
        self.rewards.extend(meta["rewards"])
        self.accuracy = dict(meta["accuracy"])
        self.tokens, self.rollouts, self.digest = meta["tokens"], meta["rollouts"], int(container.meta["digest"], 16)
        return {}

    def _check_unchanged(self, config_hash: str, environments: Mapping[str, str]) -> None:
        """CursorMismatch if the settings or environments differ from the checkpoint's and the difference is not accepted."""
        now = {name: env.fingerprint for name, env in self.environments.items()}
        if config_hash != self.config.hash and "config" not in self.run.accept:
            raise CursorMismatch(
                f"its checkpoint was made with config {config_hash}, this is {self.config.hash}; give the settings it had, or accept the change with "
                "--accept config",
                {"config": (config_hash, self.config.hash)},
            )
        changed = sorted(name for name, was in environments.items() if now.get(name, "") != was)
        if changed and "data" not in self.run.accept:
            raise CursorMismatch(
                f"the files of {', '.join(changed)} changed since its checkpoint, so rewards may mean something else; put them back, or accept the change "
                "with --accept data",
                {name: (environments[name], now.get(name, "")) for name in changed},
            )

    def begin(self, resumed: Mapping[str, Any] | None) -> None:
        if not self.run.is_lead:
            return
        first = self.trainer.steps_taken
        sweep_temporaries(self.batches)
        for path in self.batches.glob("step_*"):  # made again from the arrival log, to the byte
            if int(path.name[5:17]) >= first:
                path.unlink()
        self.orchestrator = self.run.resources.enter_context(
            Orchestrator(
                self.config, self.run, environments=self.environments, codec=self.codec, batches=self.batches, first=first,
                models={v: self.trainer.model_with(w) for v, w in sorted(self.older.items())} | {first: self.trainer.model},
            )
        )  # fmt: skip
        if first == 0 and (found := self.orchestrator.evaluate(0)):
            self.accuracy_first = found["eval/all/greedy"]
            self._note_accuracy(found)

    # --------------------------------------------------------------------------------------------- steps

    def step(self) -> StepOutcome | None:
        report = self._next_report() if self.run.is_lead else None
        code = self._command(_END if report is None else _SKIP if report.path is None else _TRAIN)
        if code == _END:
            return None
        step, lag = self.trainer.steps_taken, self.config.rollouts.lag
        self._metrics = {}
        if lag:
            self.older[step] = self.trainer.weights()
            self.older.pop(step - lag, None)
        if code == _SKIP:
            self.trainer.skip()
            outcome = StepOutcome(loss=0.0, learned=0, grad_norm=0.0, lr=self.trainer.learning_rate())
        else:
            batch = open_training_batch(batch_path(self.batches, step))
            self._count(batch)
            result = self.trainer.step(batch)
            self._metrics |= result.metrics
            outcome = StepOutcome(loss=result.loss, learned=result.tokens, grad_norm=result.grad_norm, lr=result.lr)
        if report is not None:
            self._after(report)
        return outcome

    def _next_report(self) -> StepReport | None:
        """Wait for the next batch; None if a signal asks the run to stop before it is published."""
        assert self.orchestrator is not None
        told = time.monotonic()

        def heartbeat() -> None:
            nonlocal told
            if self.run.world_size > 1 and time.monotonic() - told > _HEARTBEAT:
                self._broadcast(_WAIT)
                told = time.monotonic()

        return self.orchestrator.next_batch(heartbeat)

    def _command(self, code: int) -> int:
        """Tell every rank what rank 0 does next. Collective."""
        if self.run.is_lead:
            return self._broadcast(code)
        while (code := self._broadcast(_END)) == _WAIT:
            pass
        return code

    def _broadcast(self, code: int) -> int:
        """The code of rank 0, and the signal that it received. Collective."""
        from headrace.train.lm import naming_lost_peers

        with Wait("train.command"), naming_lost_peers(f"waiting for batch {self.trainer.steps_taken}"):
            code, signal = self.run.gather([code, self.run.stop_signal])[0]
        self.run.stop_signal = signal or self.run.stop_signal
        return code

    def _count(self, batch: TrainingBatch) -> None:
        """Count a batch, and add it to the digest of all batches that were trained on."""
        behind = batch.step - batch.arrays["sample_policy_version"]
        self._metrics |= {"staleness/mean": float(behind.mean()), "staleness/max": int(behind.max())}
        chain = xxhash.xxh3_64(self.digest.to_bytes(8, "little"))
        for name in ("ids", "mask", "logprobs", "advantage", "sample_start", "sample_policy_version"):
            chain.update(np.ascontiguousarray(batch.arrays[name]).data)
        self.digest = chain.intdigest()
        self.tokens += batch.tokens

    def _after(self, report: StepReport) -> None:
        """On rank 0, after a step: give the engine the new version, evaluate, and collect metrics."""
        orchestrator, version = self.orchestrator, self.trainer.steps_taken
        assert orchestrator is not None
        failed, recorded = orchestrator.publish(version, self.trainer.model) or (Counter(), 0)
        self.failed += failed
        self.recorded += recorded
        reward = report.metrics.get("reward/all/mean", math.nan)
        self.reward_first = reward if math.isnan(self.reward_first) else self.reward_first
        self.rewards.append(reward)
        self.rollouts += report.rollouts
        self._metrics |= {
            **report.metrics, "rollouts/count": report.rollouts, "rollouts/samples": report.samples, "rollouts/tokens": report.tokens,
            "rollouts/recorded": recorded, **{f"rollouts/failed/{reason}": n for reason, n in failed.items()},
        }  # fmt: skip
        last = min(self.config.run.steps, self.config.run.stop_after or self.config.run.steps)
        if version % self.config.eval.every == 0 or version == last:
            found = orchestrator.evaluate(version) or {}
            self._note_accuracy(found)
            self._metrics |= found

    def _note_accuracy(self, found: Mapping[str, float]) -> None:
        for key, value in found.items():
            if key.endswith("/greedy"):
                self.accuracy[key.split("/")[1]] = value

    def step_metrics(self) -> Mapping[str, Any]:
        return self._metrics

    def mix(self, line: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def progress_text(self, line: Mapping[str, Any]) -> str:
        accuracy = f"{self.accuracy['all']:.1%}" if "all" in self.accuracy else "–"
        failed = ", ".join(
            f"{int(n)} {key[16:]}" for key, n in line.items() if key.startswith("rollouts/failed/") and n
        )
        return (
            f"reward {line.get('reward/all/mean', math.nan):.3f}  held out {accuracy:>6}  {int(line.get('rollouts/tokens', 0)):>6,} tok  "
            f"lag {int(line.get('staleness/max', 0))}" + (f"  failed {failed}" if failed else "")
        )

    # ------------------------------------------------------------------------------- checkpoint, summary

    def state(self) -> TaskState:
        meta = {
            "versions": sorted(self.older), "environments": {name: env.fingerprint for name, env in self.environments.items()},
            "rewards": list(self.rewards), "reward_first": _none_if_nan(self.reward_first), "accuracy_first": _none_if_nan(self.accuracy_first),
            "accuracy": self.accuracy, "tokens": self.tokens, "rollouts": self.rollouts,
        }  # fmt: skip
        arrays = {f"version/{v}/{name}": array for v, weights in self.older.items() for name, array in weights.items()}
        return TaskState(meta={"rl": meta}, digest=f"{self.digest:016x}", arrays=arrays)

    def saved(self, state: TaskState, oldest: int) -> None:
        # A resume may fall back to the oldest checkpoint: the files that it needs are kept.
        for path in self.batches.glob("step_*"):
            if int(path.name[5:17]) < oldest:
                path.unlink(missing_ok=True)
        if self.orchestrator is not None and not self.config.rollouts.keep:
            self.orchestrator.log.drop_below(oldest)

    def summarise(self, common: Mapping[str, Any]) -> RLSummary:
        return RLSummary(
            **common, reward_first=self.reward_first, reward_last=sum(self.rewards) / len(self.rewards) if self.rewards else math.nan,
            accuracy_first=self.accuracy_first, accuracy=self.accuracy.get("all", math.nan),
            accuracies={name: share for name, share in self.accuracy.items() if name != "all"}, rollouts=self.rollouts, tokens=self.tokens,
            failed=dict(self.failed), recorded=self.recorded, digest=f"{self.digest:016x}",
            decays=bool(self.config.policy.decay),
        )  # fmt: skip


def _newest_checkpoint(folder: RunFolder) -> Container:
    from headrace.train import CheckpointStore

    found = CheckpointStore(folder.path / "checkpoints", writer=False).latest()
    if found is None:
        raise ConfigError(f"policy.model: {folder.path} holds no checkpoint to start from")
    return found[1]


def _codec_of(folder: RunFolder) -> Codec:
    """The tokenizer of an earlier run."""
    from headrace.train.policy_models import TokenizerCodec

    if isinstance(folder.config, RLConfig):
        return CharacterCodec(folder.config.policy.alphabet)
    text = folder.text_config.text
    if text.tokenizer == "sample":
        return TokenizerCodec(sample_tokenizer(cache_folder()))
    name = None if text.tokenizer == "bytes" else text.tokenizer
    return TokenizerCodec(load_tokenizer(name, eos=text.eos_token, bos=text.bos_token, base=folder.base))


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
