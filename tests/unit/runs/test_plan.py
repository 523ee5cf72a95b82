"""A run on paper goes as the run itself would."""

from __future__ import annotations

import pytest

from headrace.cli.plan import sparkline
from headrace.errors import ConfigError
from headrace.runs.config.loading import load_config
from headrace.runs.job import Job
from headrace.runs.plan import BINS, plan_run


@pytest.fixture
def config(tmp_path, write_jsonl):
    """Two sources of very unequal documents: 600 of about 60 tokens, 40 of about 900."""
    write_jsonl("short.jsonl", [f"{i} " + "x" * (30 + i * 7 % 60) for i in range(600)])
    write_jsonl("long.jsonl", [f"{i} " + "y" * (600 + i * 37 % 600) for i in range(40)])
    (tmp_path / "c.toml").write_text(
        f'[run]\nsteps = 40\n[[source]]\nspec = "jsonl:{tmp_path}/short.jsonl"\nweight = 3\n'
        f'[[source]]\nspec = "jsonl:{tmp_path}/long.jsonl"\nweight = 1\n[text]\nseq_len = 64\n'
        '[loader]\nglobal_batch_size = 6\nlanes = 6\nexhausted = "repeat"\n[train]\n'
    )

    def load(*overrides: str):
        return load_config(tmp_path / "c.toml", overrides, env={})

    return load


def delivered(config, steps: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """What a loader really delivers: tokens and last step by source, steps, fillers."""
    job = Job(config)
    with job.loader(tokenizer_workers=0, prefetch_batches=0) as loader:
        taken, last = 0, {}
        while taken < steps and (batch := next(loader, None)) is not None:
            taken += 1
            last |= {piece.source: taken for piece in loader.pieces(batch)}
        body = loader.state_dict()["body"]
        loader.data.close()
    return dict(zip(body["sources"], body["source_tokens"], strict=True)), last, taken, body["delivered"]["fillers"]


def test_shares_epochs_and_repeats_are_those_of_the_run(config):
    found = plan_run(config(), steps=600)
    tokens, _, _, fillers = delivered(config(), 600)
    total = sum(tokens.values())
    assert fillers == 0
    assert found.ends_at is None
    for s in found.sources:
        assert s.share == pytest.approx(tokens[s.name] / total, abs=0.01)
        assert s.share == pytest.approx(s.target, abs=0.01)
        assert s.tokens == pytest.approx(tokens[s.name], rel=0.05)
        assert s.epochs == pytest.approx(s.tokens / s.available, rel=1e-3)
        assert s.documents == pytest.approx(s.epochs * s.rows, abs=1)
        assert len(s.shares) == BINS
    short, long = found.sources
    assert short.repeats_at == pytest.approx(short.available / short.tokens * 600, rel=0.15)
    assert long.repeats_at == pytest.approx(long.available / long.tokens * 600, rel=0.35)
    assert short.dry_at is long.dry_at is None


def test_finite_sources_run_dry_and_end_about_when_the_run_does(config):
    finite = config("--loader.exhausted", "drop")
    found = plan_run(finite, steps=10_000)
    tokens, last, steps, _ = delivered(finite, 10_000)
    assert found.ends_at == pytest.approx(steps, rel=0.15)
    for s in found.sources:
        assert s.tokens == pytest.approx(tokens[s.name], rel=0.05)
        assert s.epochs == pytest.approx(1, abs=0.01)
        assert s.dry_at == pytest.approx(last[s.name], rel=0.2)
        assert s.repeats_at is None
    assert found.sources[0].shares[-1] == 0.0, "nothing is left at the end"


def test_the_first_dry_source_ends_a_run_that_stops_there(config):
    found = plan_run(config("--loader.exhausted", "stop_first"), steps=10_000)
    _, _, steps, _ = delivered(config("--loader.exhausted", "stop_first"), 10_000)
    assert found.ends_at == pytest.approx(steps, rel=0.2)


def test_a_cap_on_tokens_is_kept(config):
    found = plan_run(config("--source.1.max_tokens", "9000"), steps=300)
    tokens, last, _, _ = delivered(config("--source.1.max_tokens", "9000"), 300)
    assert found.sources[1].tokens == pytest.approx(tokens["long"], rel=0.1)
    assert found.sources[1].dry_at == pytest.approx(last["long"], rel=0.2)


def test_a_run_of_any_length_is_planned_at_once(config):
    assert plan_run(config(), steps=1 << 40).seconds < 60


def test_weights_that_change_on_the_way_change_the_shares_from_there_on(config, tmp_path):
    with open(tmp_path / "c.toml", "a") as handle:
        handle.write("[[mix.change]]\nstep = 150\nweights = { short = 1, long = 9 }\n")
    found = plan_run(config(), steps=300)
    tokens, _, _, _ = delivered(config(), 300)
    assert found.changes == ((150, (0.1, 0.9)),)
    half = BINS // 2
    short, long = found.sources
    assert short.shares[half // 2] == pytest.approx(0.75, abs=0.08)
    assert short.shares[half + half // 2] == pytest.approx(0.1, abs=0.08)
    assert short.target == pytest.approx(0.425, abs=0.005)
    assert long.share == pytest.approx(tokens["long"] / sum(tokens.values()), abs=0.01)


@pytest.mark.parametrize("steps", [0, -4, (1 << 40) + 1])
def test_a_number_of_steps_that_no_run_has_is_refused(config, steps):
    with pytest.raises(ConfigError, match=rf"--steps must be between 1 and 2\*\*40, got {steps}"):
        plan_run(config(), steps=steps)


def test_a_source_without_rows_or_weight_gets_nothing(config, write_jsonl):
    write_jsonl("none.jsonl", [])
    base = config()
    none = base.source[0].model_copy(update={"spec": base.source[0].spec.replace("short", "none"), "name": "none"})
    idle = base.source[1].model_copy(update={"weight": 0.0, "name": "idle"})
    found = plan_run(base.model_copy(update={"source": (*base.source, none, idle)}))
    assert [s.tokens > 0 for s in found.sources] == [True, True, False, False]
    assert [s.dry_at for s in found.sources] == [None] * 4


def test_a_sparkline_rises_to_its_highest_value():
    assert sparkline([0, 0.1, 0.5, 1.0]) == " ▂▅█"
    assert sparkline([0, 0]) == "  "
    assert sparkline([]) == ""


def test_a_run_that_ends_with_its_first_dry_source_is_warned_of_it(config):
    found = plan_run(config("--loader.exhausted", "stop_first"), steps=10_000)
    assert found.ends_at is not None
    assert any(
        w.startswith("source short is dry after 1 epoch(s)") and w.endswith("the run ends there")
        for w in found.warnings
    )
    assert plan_run(config("--loader.exhausted", "stop_first"), steps=1).warnings == ()
