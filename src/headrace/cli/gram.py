"""headrace gram SHARDS...: the Gram matrix of rows, the same bits on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from headrace.cli.terminal import TEXT, Display, Line, Output, facts, marked
from headrace.errors import ConfigError, count_text, short_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cyclopts import Token

    from headrace.reduce.coordinator import CrossNodeGramReduction
    from headrace.reduce.orders import WorkOrder
    from headrace.reduce.reduce_shards import GramSummary
    from headrace.reduce.shards import RowShards


def _whole(_: object, tokens: Sequence[Token]) -> int:
    """A whole number. What converts numbers otherwise rounds 1.5 to 2."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a whole number is expected, got {text!r}") from None


def gram(
    *shards: Annotated[str, Parameter(help="Files, folders or globs of .npy, .safetensors or .parquet, on disk or in a store (s3://bucket/acts/), in the order of the sum.")],
    out: Annotated[Path, Parameter(help="The result.")] = Path("gram.safetensors"),
    field: Annotated[str | None, Parameter(help="Tensor or column of the rows (parquet: a,b,c for several columns).")] = None,
    targets: Annotated[str | None, Parameter(help="Tensor or column of targets: also sums the cross-Gram, for ridge.")] = None,
    weights: Annotated[str | None, Parameter(help="Tensor or column of row weights.")] = None,
    shift: Annotated[Path | None, Parameter(help="A .npy vector to subtract from every row: keeps digits where means are large.")] = None,
    rows: Annotated[Literal["f64", "f32", "f16", "bf16"] | None, Parameter(help="Convert rows to this type; as stored unless given. bf16: says that uint16 .npy files hold the bits of bfloat16.")] = None,
    chunk: Annotated[int | None, Parameter(converter=_whole, help="Rows a chunk; part of what the bits depend on. 4 a column, 4,096 at least, unless given.")] = None,
    span: Annotated[int | None, Parameter(converter=_whole, help="Chunks shipped as one partial: 1 unless given, or 128, 256, 512, … for wide fleets. Never changes bits.")] = None,
    workers: Annotated[int | None, Parameter(converter=_whole, help="Worker processes or actors; one a processor unless given (--engine spool: 0 to leave it to those who join). Never changes bits.")] = None,
    threads: Annotated[int | None, Parameter(converter=_whole, help="Threads a worker; 1 unless given. Never changes bits.")] = None,
    engine: Annotated[Literal["local", "torchrun", "ray", "spool"] | None, Parameter(help="Which processes compute: local processes, ranks of torchrun, Ray actors, or any process that sees the folder.")] = None,
    spool: Annotated[Path | None, Parameter(help="The folder of --engine spool; OUT.work/spool unless given.")] = None,
    join: Annotated[Path | None, Parameter(help="Work for the pass in this spool, from any machine that sees it, until it is over.")] = None,
    window: Annotated[int | None, Parameter(converter=_whole, help="Partials a worker may be ahead of the slowest; 4 unless given.")] = None,
    save_every: Annotated[float | None, Parameter(help="Seconds between two checkpoints; 30 unless given.")] = None,
    deadline: Annotated[float | None, Parameter(help="Seconds without an answer of any worker after which it is an error; 600 unless given.")] = None,
    replace: Annotated[bool, Parameter(help="Overwrite a result of something else, and begin anew where a pass over something else was left.")] = False,
    output: Output = TEXT,
) -> int:  # fmt: skip
    """Sum x·xᵀ over all rows of the shards, to the same bits on any number of workers, threads and processors.

    Workers and coordinator can be killed at any moment: the same command continues.

    ```
    headrace gram acts/*.npy --out layer12.safetensors
    headrace gram s3://bucket/acts/*.npy --out layer12.safetensors
    headrace gram acts.parquet --field hidden --targets label --workers 8 --out probe.safetensors
    torchrun --nproc-per-node 4 -m headrace gram acts/ --out layer12.safetensors
    headrace gram acts/ --spool /shared/s --out layer12.safetensors
    headrace gram --join /shared/s                    meanwhile, on other machines
    python -c "import headrace as hr; print(hr.reduce.GramResult.load('layer12.safetensors').pca(8).share)"
    ```
    """
    from headrace.reduce.reduce_shards import GramPlan, reduce_shards

    if join is not None:
        if engine is not None or spool is not None:
            raise ConfigError(
                "--join works for a pass that another process coordinates: leave out --engine and --spool"
            )
        return _join(output, join, shards, workers, threads, deadline)
    if not shards:
        raise ConfigError("name at least one shard: headrace gram acts/*.npy --out layer12.safetensors")
    given: dict[str, Any] = {
        "field": field, "targets": targets, "weights": weights, "rows": rows, "shift": shift, "chunk": chunk, "span": span, "workers": workers,
        "threads": threads, "engine": engine, "spool": spool, "window": window, "save_every": save_every, "deadline": deadline, "replace": replace,
    }  # fmt: skip
    plan = GramPlan(shards=shards, out=out, **{name: value for name, value in given.items() if value is not None})
    with output.display() as display:
        summary = reduce_shards(plan, _Watcher(display, out, plan.spool_folder if plan.spooled else None))
    if summary.state == "worker":
        return 0
    output.answer(summary, _closing(summary))
    return 128 + summary.signal if summary.signal else 0


def _join(
    output: Output,
    spool: Path,
    shards: tuple[str, ...],
    workers: int | None,
    threads: int | None,
    deadline: float | None,
) -> int:
    from headrace.reduce.reduce_shards import join_spool

    with output.display() as display:

        def began(order: WorkOrder, count: int) -> None:
            sizes = f"{order.partition.n_rows:,} in {order.partition.n_chunks:,} chunks"
            rows = [("rows", sizes), ("workers", f"{count_text(count, 'worker')} here")]
            display.opened(f"[bold]headrace[/] works for [bold]{spool}[/]", rows)

        patience = {} if deadline is None else {"deadline": deadline}
        summary = join_spool(
            spool, shards=shards, workers=workers, threads=threads, **patience, began=began, notice=display.notice,
            progress=lambda made: display.progress(f"made {made:,} partials", made),
        )  # fmt: skip
    how = "the pass is over" if summary.state == "finished" else "stopped"
    output.answer(summary, [f"  {how}; made {summary.partials:,} partials in {summary.seconds:.1f} s"])
    return 128 + summary.signal if summary.signal else 0


class _Watcher:
    """Shows the events of a pass."""

    def __init__(self, display: Display, out: Path, spool: Path | None) -> None:
        self._display, self._out, self._spool = display, out, spool

    def notice(self, sentence: str) -> None:
        self._display.notice(sentence)

    def began(self, order: WorkOrder, shards: RowShards, engine: str, workers: int, resumed_at: int) -> None:
        partition = order.partition
        folded = f", {resumed_at:,} folded already" if resumed_at else ""
        shape = f"{shards.n_rows:,} x {shards.width:,} {shards.dtype}"
        rows = [
            ("rows", f"{shape} in {count_text(len(shards.spec.paths), 'shard')}"),
            ("chunks", f"{partition.n_chunks:,} of {partition.chunk_size:,} rows{folded}"),
            ("workers", f"{workers} ({engine}), {count_text(order.threads, 'thread')} each"),
        ]
        if self._spool is not None:
            rows.append(("join", f"headrace gram --join {self._spool.absolute()}"))
        headline = f"[bold]headrace[/] {'goes on with' if resumed_at else 'reduces to'} [bold]{self._out}[/]"
        self._display.opened(headline, rows)

    def progress(self, reduction: CrossNodeGramReduction) -> None:
        folded, chunks = reduction.frontier, reduction.partition.n_chunks
        self._display.progress(f"folded {folded:,} of {chunks:,} chunks, {reduction.pending} pending", folded, chunks)


def rows_folded(summary: GramSummary) -> int:
    """Rows of the chunks that this run folded; the last chunk may be short."""
    before, now = (min(chunks * summary.chunk_size, summary.n_rows) for chunks in (summary.resumed_at, summary.folded))
    return now - before


def _closing(summary: GramSummary) -> Iterator[Line]:
    words = {"reduced": "reduced", "complete": "is complete already", "stopped": "stopped"}[summary.state]
    yield marked(f"\n[bold]{words}[/]  {summary.out}")
    lines = [("rows", f"{summary.n_rows:,} x {summary.width:,}, chunks of {summary.chunk_size:,}")]
    if summary.sha256:
        lines.append(("sha256", summary.sha256))
    if summary.seconds:
        lines.append(
            ("speed", f"{short_number(rows_folded(summary) / summary.seconds)} rows/s over {summary.seconds:.1f} s")
        )
    if summary.replaced:
        lines.append(("workers", f"{summary.replaced} died and were replaced"))
    if summary.state == "stopped":
        lines += [("folded", f"{summary.folded:,} of {summary.n_chunks:,} chunks"), ("go on", "the same command")]
    yield from facts(lines)
