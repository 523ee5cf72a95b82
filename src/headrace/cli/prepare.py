"""headrace prepare CONFIG: tokenise once, into shards that are mapped from then on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.app import Settings, overrides
from headrace.cli.terminal import TEXT, Line, Output, facts, marked
from headrace.errors import short_number
from headrace.runs.config.loading import load_config

if TYPE_CHECKING:
    from headrace.loader import TextDataset
    from headrace.runs.prepare import PrepareSummary


def prepare(
    config: Path,
    /,
    *,
    settings: Settings = (),
    out: Annotated[Path | None, Parameter(help="The folder to write; prepared/<run.name> unless given.")] = None,
    workers: Annotated[int | None, Parameter(help="Threads that tokenise; one a processor unless given.")] = None,
    shard_mb: Annotated[
        int | None, Parameter(help="Size of a shard in MiB; 128 unless given. Cannot change in a folder once begun.")
    ] = None,
    output: Output = TEXT,
) -> int:
    """Tokenise every document of a config's sources once, into checked shards that `PreparedDataset` maps.

    Can be stopped or killed at any moment: the same command continues, and the result has the same bytes.

    ```
    headrace prepare examples/quickstart.toml
    headrace prepare run.toml --out /data/web-mix --workers 8 --text.seq_len 4096
    python -c "import headrace as hr; print(len(hr.PreparedDataset('prepared/quickstart')))"
    ```
    """
    from headrace.runs.prepare import prepare as run

    checked = load_config(config, overrides(settings))
    folder = out if out is not None else Path("prepared") / checked.run.name
    with output.display() as display:

        def began(data: TextDataset, threads: int, resumed: bool) -> None:
            sources = [f"{s.name} {deal.rows:,} rows" for s, deal in zip(data.sources, data.deals, strict=True)]
            text = f"{data.tokenizer.name} tokenizer ({data.vocab_size:,} ids), seq_len {data.seq_len}, {data.packing.strategy}"
            headline = f"[bold]headrace[/] {'goes on preparing' if resumed else 'prepares'} [bold]{folder}[/]"
            display.opened(headline, [("sources", "  ".join(sources)), ("text", text), ("threads", str(threads))])

        summary = run(
            checked,
            folder,
            display,
            began=began,
            workers=workers,
            shard_bytes=None if shard_mb is None else shard_mb << 20,
        )
    command = _command(config, settings, out, shard_mb)
    output.answer(summary.to_dict(), _closing(summary, command))
    return 128 + summary.signal if summary.signal else 0


def _closing(summary: PrepareSummary, command: str) -> Iterator[Line]:
    words = {"prepared": "prepared", "complete": "is complete already", "stopped": "stopped"}[summary.state]
    yield marked(f"\n[bold]{words}[/]  {summary.folder}")
    rows = [
        ("data", f"{summary.documents:,} documents, {summary.tokens:,} tokens, {summary.bytes / 1e6:,.1f} MB in {summary.shards:,} shards"),
        ("sources", "  ".join(f"{name} {short_number(s['tokens'])}" for name, s in summary.sources.items())),
        ("speed", f"{short_number(summary.tokens_per_second)} tokens/s over {summary.seconds:.1f} s"),
    ]  # fmt: skip
    if summary.kept or summary.remade:
        rows.append(("shards", f"{summary.kept:,} kept, {summary.remade:,} made again"))
    if summary.bad_rows:
        rows.append(("left out", f"{summary.bad_rows:,} bad rows"))
    if summary.state == "stopped":
        rows.append(("go on", command))
    else:
        rows.append(("use", f'headrace.PreparedDataset("{summary.folder}")'))
    yield from facts(rows)


def _command(config: Path, settings: tuple[str, ...], out: Path | None, shard_mb: int | None) -> str:
    """The command that continues this one."""
    words = ["headrace", "prepare", str(config), *(f"--{setting}" for setting in settings)]
    if out is not None:
        words += ["--out", str(out)]
    if shard_mb is not None:
        words += ["--shard-mb", str(shard_mb)]
    return shlex.join(words)
