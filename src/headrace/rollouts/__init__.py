"""RL rollouts become training batches beside an event loop.

on arrival, one rollout at a time, in a worker thread                    at the end of a step, all rollouts
wire ──► ingest ──► pretokenize ──► interleave ──► batch_files           advantages ──► filters ──► packing ──► batch_files ──► transport
decode   check      if an engine    samples        append experts        by group       what is     micro       publish         trainer
                    sent no ids                                                         not sent    batches

wire.py           the wire contract: token columns as raw bytes, arrays or lists; decoded, checked, encoded
records.py        typed records: Rollout, Step, StepTokens, RoutedExperts, TrainingSample
ingest.py         replies of OpenAI and vLLM servers and `verifiers` rollouts, checked (checks.py: what is checked)
episodes.py       episodes and traces of `verifiers` 0.4 and later
pretokenize.py    tokens for turns whose engine returned none
interleave.py     turns become samples; every token gets its routed experts
sample_rollout.py process_rollout: one rollout from the wire to samples
batch_files.py    a step's batch as files: written on arrival, published at the step's end, opened by the trainer
advantages.py     how much better a rollout was than its group
filters.py        which rollouts send no sample
packing.py        samples become micro batches, equally many for every rank
step_metrics.py   metrics of a step
pipeline.py       RolloutPipeline: all of the above, beside an event loop
loop_yield.py     lets the event loop run between slices of the pipeline's work
processes.py      process_rollout in worker processes
values.py         values in msgpack without pickle, for pipes and files
groups.py         which rollouts belong to which step; failures, refills, late arrivals
scheduler.py      sends requests to environments under one limit; ends steps at their deadlines
environments.py   environments as functions; environment_processes.py, environment_actors.py: in processes, in Ray actors
engine.py         inference engines; openai_engine.py: servers by URL; weights.py, vllm_worker.py: weights for them as files
arrival_log.py    every finished rollout, for a restarted run
transport.py      batches to the trainer through a folder; zmq_transport.py: to another machine
saving.py         JSON lines for people: rollouts, tokens
dumps.py          dumps of a step's raw rollouts; replay.py measures a step again
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
from headrace.rollouts.groups import EnvPolicy, GroupBook, GroupCounts, Request, StepGroups, solve_rates
from headrace.rollouts.ingest import Limits, rollout_from_verifiers, step_from_reply
from headrace.rollouts.interleave import interleave_rollout
from headrace.rollouts.packing import MicroBatch, Packed, pack_samples
from headrace.rollouts.pipeline import RolloutPipeline, StepPhases, StepReport
from headrace.rollouts.pretokenize import needs_tokens, pretokenize
from headrace.rollouts.records import ExpertRows, Rollout, RoutedExperts, Step, StepTokens, TrainingSample, VersionSpan
from headrace.rollouts.saving import export_tokens, save_rollouts
from headrace.rollouts.scheduler import RolloutScheduler
from headrace.rollouts.step_metrics import rollout_metrics
from headrace.rollouts.transport import SpoolReceiver, SpoolSender, TrainingBatchReceiver, TrainingBatchSender
from headrace.rollouts.wire import binary_rollout, encode_rollout

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
    "binary_rollout",
    "compute_advantages",
    "default_advantage",
    "dump_raw_rollouts",
    "encode_rollout",
    "episode_from_deltas",
    "export_tokens",
    "interleave_rollout",
    "needs_tokens",
    "open_training_batch",
    "pack_samples",
    "pretokenize",
    "read_episodes",
    "rollout_from_verifiers",
    "rollout_metrics",
    "rollouts_from_episode",
    "save_rollouts",
    "solve_rates",
    "step_from_reply",
]
