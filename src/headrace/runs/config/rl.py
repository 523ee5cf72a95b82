"""What an RL run was asked to be, as checked values.

    [policy]                      the model and how it learns
    [engine]                      who samples from it
    [[env]]                       environments, each with its share of the groups
    [rollouts]                    how many groups a step, how far ahead of the trainer
    [eval]                        held-out tasks

A config with [rollouts], [policy] or [[env]] is read as this.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.errors import found_text
from headrace.runs.config.base import (
    NONE_GIVEN,
    Array,
    Beta,
    JobConfig,
    Name,
    RunSection,
    Section,
    Text,
    array,
    with_unique_names,
)

__all__ = ["EngineSection", "EnvSection", "EvalSection", "PolicySection", "RLConfig", "RolloutsSection"]


def _strings(value: object) -> object:
    """One URL may be written without brackets."""
    return (value,) if isinstance(value, str) else array(value)


class PolicySection(Section):
    """[policy]: the model and how it learns."""

    model: Text = "gpt-digits"
    """gpt-digits, gpt-tiny or gpt-small with random weights; the folder of a `headrace run` whose newest checkpoint is the start; hf:FOLDER of transformers."""
    alphabet: Text = "0123456789>=<+-* "
    """Characters of the built-in tokenizer, one id each."""
    context: int = Field(64, ge=2, le=1 << 20)
    """Longest prompt and answer together, in tokens."""
    lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(0, ge=0)
    decay: float = Field(0.0, ge=0, le=1)
    """Last share of the steps over which the learning rate falls to 0."""
    betas: Array[tuple[Beta, Beta]] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    advantage: Text = "std"
    """mean, std, leave_one_out, or package.module:function."""
    clip: Array[tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]] = (0.2, 0.2)
    """How far below and above 1 the ratio of probabilities counts."""
    importance_cap: float = Field(0.0, ge=0)
    """Above 0: truncated importance sampling at this ratio, in place of the clip."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the initial policy."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    micro_tokens: int = Field(8192, ge=16, le=1 << 24)
    """Tokens of one forward pass; a longer sample loses its end."""
    threads: int = Field(1, ge=1, le=1024)
    """torch threads of each process."""

    @field_validator("advantage")
    @classmethod
    def _know_the_advantage(cls, name: str) -> str:
        from headrace.rollouts.advantages import advantage_named

        advantage_named(name)
        return name

    @field_validator("alphabet")
    @classmethod
    def _refuse_repeated_characters(cls, alphabet: str) -> str:
        if len(alphabet) < 2 or len(set(alphabet)) < len(alphabet):
            raise ValueError(f"expected at least two characters, each once, found {found_text(alphabet)}")
        return alphabet


class EngineSection(Section):
    """[engine]: who samples from the policy."""

    kind: Literal["embedded", "openai"] = "embedded"
    """embedded: in this process. openai: servers by URL that take ids and return ids and log-probs."""
    url: Annotated[tuple[Text, ...], BeforeValidator(_strings)] = Field((), examples=[["http://gpu1:8000/v1"]])
    model: Text = Field("policy", examples=["policy"])
    """The name that the servers serve the policy under."""
    weights: Literal["files", "none"] = "files"
    """files: each version is written to weights/ and the servers are asked to load it. none: the servers keep what they have."""
    slots: int = Field(256, ge=1, le=1 << 16)
    """Requests that the embedded engine moves on at a time."""
    tolerance: float = Field(1e-4, gt=0)
    """How far the log-probs of the probe may differ between engine and trainer. 0.02 for engines that compute in bfloat16."""
    deadline: float = Field(120.0, gt=0)
    """Seconds that one completion may take."""

    @model_validator(mode="after")
    def _require_urls(self) -> EngineSection:
        if self.kind == "openai" and not self.url:
            raise ValueError('engine.kind = "openai" needs url = ["http://host:8000/v1"]')
        if self.kind == "embedded" and self.url:
            raise ValueError('engine.url belongs to kind = "openai"; leave it out, or set the kind')
        return self


class EnvSection(Section):
    """[[env]]: an environment and its share of the groups."""

    spec: Text = Field(examples=["python:sort.py:play"])
    name: Name = Field("", examples=["sort"])
    """Derived from the spec unless given."""
    weight: float = Field(1.0, ge=0)
    """Share of the groups, in proportion to the weights of all environments."""
    group_size: int = Field(16, ge=1, le=1 << 16)
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["ray"] = Field(0, examples=[2])
    """Processes that play it; 0: on the event loop; "ray": Ray actors, one a CPU of the cluster."""
    max_tokens: int = Field(32, ge=1, le=1 << 20)
    """The longest answer, unless the environment asks for another."""
    temperature: float = Field(1.0, gt=0)
    memory_mb: int = Field(0, ge=0)
    """Address space of each worker process; 0: no limit."""
    options: dict[str, Any] = Field(default_factory=dict, examples=[{"digits": 4}])
    """Keyword arguments of the environment."""

    @field_validator("spec")
    @classmethod
    def _require_kind(cls, spec: str) -> str:
        kind, _, rest = spec.partition(":")
        if kind not in ("python", "reasoning-gym", "verifiers") or not rest.strip():
            raise ValueError(
                f'expected "python:FILE.py:FUNCTION", "reasoning-gym:DATASET" or "verifiers:ENVIRONMENT", found {found_text(spec)}'
            )
        return spec

    @model_validator(mode="after")
    def _choose_name(self) -> EnvSection:
        if not self.name:
            kind, _, rest = self.spec.partition(":")
            path = rest.rpartition(":")[0] if kind == "python" else rest
            stem = path.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
            object.__setattr__(
                self, "name", "".join(c if c.isalnum() or c in "-_" else "-" for c in stem)[:48] or "env"
            )
        if self.name == "all":
            raise ValueError(
                'an environment cannot be called "all", which stands for all of them in metrics; give it another name'
            )
        return self


class RolloutsSection(Section):
    """[rollouts]: how a step's rollouts are asked for."""

    groups_per_step: int = Field(32, ge=1, le=1 << 20)
    lag: int = Field(1, ge=0, le=64)
    """Steps that rollouts are generated ahead of the trainer: step n is sampled by version n − lag."""
    on_failure: Literal["keep", "refill", "drop"] = "refill"
    max_refills: int = Field(2, ge=0, le=100)
    concurrency: int = Field(1024, ge=1, le=1 << 20)
    """Rollouts under way at a time, evaluation included."""
    deadline: float = Field(120.0, gt=0)
    """Seconds that one rollout may take."""
    step_deadline: float = Field(600.0, gt=0)
    """Seconds after which a step goes on without the rollouts that are missing."""
    keep: bool = True
    """Keep the arrival log of steps that a checkpoint covers, for `headrace step`, `find`, `diff` and the page."""
    drop_equal: bool = True
    """Leave out groups whose rewards are all equal: they teach nothing."""


class EvalSection(Section):
    """[eval]: held-out tasks."""

    every: int = Field(20, ge=1)
    tasks: int = Field(200, ge=0)
    """Tasks of each environment; 0: no evaluation."""
    samples: int = Field(0, ge=0, le=1024)
    """Sampled answers a task, for pass@k; 0: greedy only."""


class RLRunSection(RunSection):
    """[run] of an RL run: a line for each step by default."""

    log_every: int = Field(1, ge=1)


class RLConfig(JobConfig):
    """The config of an RL run."""

    kind = "rl"
    without_effect: ClassVar = {
        "run": ("steps", "skip"),
        "engine": ("url", "slots", "tolerance", "deadline"),
        "rollouts": ("concurrency", "keep", "deadline", "step_deadline"),
        "eval": ("every", "tasks", "samples"),
    }

    run: RLRunSection = RLRunSection()
    policy: PolicySection = PolicySection()
    engine: EngineSection = EngineSection()
    env: Array[tuple[EnvSection, ...]]
    rollouts: RolloutsSection = RolloutsSection()
    eval: EvalSection = EvalSection()

    @field_validator("env")
    @classmethod
    def _weigh_and_name(cls, envs: tuple[EnvSection, ...]) -> tuple[EnvSection, ...]:
        if not envs:
            raise ValueError(NONE_GIVEN["env"])
        if all(env.weight == 0 for env in envs):
            raise ValueError("every environment has weight 0; give at least one a weight above 0")
        return with_unique_names(envs)

    def _hashed_tables(self) -> dict[str, Any]:
        tables = super()._hashed_tables()
        if self.policy.decay:  # then the learning rate depends on where the run ends
            tables["run"]["steps"] = self.run.steps
        for env in tables["env"]:
            for name in ("workers", "memory_mb"):
                env.pop(name)
        return tables
