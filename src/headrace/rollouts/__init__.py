"""RL enters as rollouts and leaves as training batches, and the event loop never stalls for it.

replies, rollouts ──► ingest ──► pretokenize ──► advantages ──► filters ──► interleave ──► packing ──► trainer
                      columns    only if         by group       who sends    samples,       micro
                                 needed                         nothing      experts as     batches
                                                                             chunks         by rank

records.py      what passes through: Rollout, Step, StepTokens, RoutedExperts, TrainingSample
ingest.py       OpenAI/vLLM replies and `verifiers` rollouts, checked and made columns (checks.py: what is checked)
episodes.py     episodes and traces of `verifiers` 0.4 and later
columns.py      numbers out of lists, msgpack and JSON text into columns (kernels.py: the compiled loops)
pretokenize.py  tokens for turns whose engine returned none
groups.py       which rollouts belong to which step; failures, refills, late arrivals
advantages.py   how much better than its group
filters.py      what sends no sample
scheduler.py    environments asked under one limit; steps that end at their deadlines
processes.py    samples made in processes of their own
values.py       what crosses a pipe or lies in a file without pickle
interleave.py   turns become samples; every token finds its routed experts
packing.py      samples become micro batches, equally many for every rank
saving.py       JSON lines for people: rollouts, tokens
dumps.py        a step's rollouts as they arrived, for `headrace replay`
"""

from headrace.rollouts.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    AdvantageOutputs,
    compute_advantages,
    default_advantage,
)
from headrace.rollouts.batch_files import BatchWriter, TrainingBatch, batch_path, open_training_batch
from headrace.rollouts.dumps import dump_raw_rollouts
from headrace.rollouts.episodes import episode_from_deltas, read_episodes, rollouts_from_episode
from headrace.rollouts.filters import Filtered, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter, apply_filters
from headrace.rollouts.groups import EnvPolicy, GroupBook, GroupCounts, Recorded, Request, StepGroups, solve_rates
from headrace.rollouts.ingest import (
    Limits,
    rollout_from_json,
    rollout_from_msgpack,
    rollout_from_verifiers,
    step_from_reply,
)
from headrace.rollouts.interleave import interleave_rollout
from headrace.rollouts.packing import MicroBatch, Packed, pack_samples
from headrace.rollouts.pipeline import RolloutPipeline, StepPhases, StepReport
from headrace.rollouts.pretokenize import needs_tokens, pretokenize
from headrace.rollouts.records import (
    ExpertRows,
    Rollout,
    RoutedExperts,
    Step,
    StepTokens,
    TrainingSample,
    VersionSpan,
)
from headrace.rollouts.saving import export_tokens, save_rollouts
from headrace.rollouts.scheduler import RolloutScheduler
from headrace.rollouts.step_metrics import rollout_metrics
from headrace.rollouts.transport import SpoolReceiver, SpoolSender, TrainingBatchReceiver, TrainingBatchSender

__all__ = [
    "AdvantageConfig",
    "AdvantageInputs",
    "AdvantageOutputs",
    "BatchWriter",
    "EnvPolicy",
    "ExpertRows",
    "Filtered",
    "GibberishFilter",
    "GroupBook",
    "GroupCounts",
    "Limits",
    "MicroBatch",
    "Packed",
    "Recorded",
    "RepetitionFilter",
    "Request",
    "Rollout",
    "RolloutPipeline",
    "RolloutScheduler",
    "RoutedExperts",
    "SpoolReceiver",
    "SpoolSender",
    "Step",
    "StepGroups",
    "StepPhases",
    "StepReport",
    "StepTokens",
    "TrainingBatch",
    "TrainingBatchReceiver",
    "TrainingBatchSender",
    "TrainingSample",
    "VersionSpan",
    "ZeroAdvantageFilter",
    "apply_filters",
    "batch_path",
    "compute_advantages",
    "default_advantage",
    "dump_raw_rollouts",
    "episode_from_deltas",
    "export_tokens",
    "interleave_rollout",
    "needs_tokens",
    "open_training_batch",
    "pack_samples",
    "pretokenize",
    "read_episodes",
    "rollout_from_json",
    "rollout_from_msgpack",
    "rollout_from_verifiers",
    "rollout_metrics",
    "rollouts_from_episode",
    "save_rollouts",
    "solve_rates",
    "step_from_reply",
]
