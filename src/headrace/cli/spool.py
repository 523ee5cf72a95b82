"""headrace spool ls|stat|verify|quarantine|purge DIR: list, describe, check and empty a spool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.terminal import TEXT, Output
from headrace.errors import ConfigError, count_text, short_number

spool = App(
    name="spool",
    help="""Look into a spool: list its files, describe its state, check every byte.

```
headrace spool stat runs/quickstart/spool
headrace spool verify /data/spool && echo whole
```""",
)


def _known(number: int | None) -> int | str:
    return "?" if number is None else number


@spool.command
def ls(directory: Path, /, *, output: Output = TEXT) -> int:
    """List the files of the queue: number, rows, size, verdict; and those that were set aside, with the reasons.

    ```
    headrace spool ls /data/spool
    ```
    """
    from headrace.spool.survey import list_files, quarantined

    files, aside = list_files(directory), quarantined(directory)
    lines = [
        f"{f['split']:<6} {f['part']:>3} {f['seq']:>12,}  rows {_known(f['first'])} + {_known(f['rows'])}  {short_number(f['bytes'])}B  {f['verdict']}"
        for f in files
    ]
    lines += [f"{f['split']:<6} quarantine/{f['file']}: {f['reason']}" for f in aside]
    output.answer(files, lines or ["no files"])
    return 0


@spool.command
def stat(directory: Path, /, *, output: Output = TEXT) -> int:
    """Describe the state of a spool: sequence, gaps, backlog, commit point, quarantine, running processes.

    ```
    headrace spool stat /data/spool
    headrace spool stat /data/spool --format json | jq .splits.train
    ```
    """
    from headrace.spool.survey import describe

    facts = describe(directory)
    lines = [
        f"{facts['path']}: {facts['dataset_name']}, {facts['training_type']}, batches of {facts['batch_size']}, {facts['kind']}, job {facts['job']}"
    ]
    for split, parts in facts["splits"].items():
        for entry in parts:
            which = f"{split} part {entry['part']}" if facts["parts"] > 1 else split
            span = f"{entry['first']} to {entry['last']}" if entry["files"] else "none"
            lines.append(
                f"  {which:<14} files {span} ({entry['files']:,}, {short_number(entry['bytes'])}B)  read {entry['read']:,}  commit {entry['commit']:,}  "
                f"backlog {entry['backlog']}  retained {entry['retained']}  quarantined {entry['quarantined']}"
                + (f"  missing {entry['gaps'][:8]}" if entry["gaps"] else "")
            )
    lines += [f"  {name:<14} {holder}" for name, holder in facts["at_work"].items()] or ["  no process holds a lock"]
    disk = facts["disk"]
    lines.append(f"  {'disk':<14} {disk['file_system'] or 'unknown file system'}, {short_number(disk['bytes'])}B free")
    lines += [f"  {'':<14} {sentence}" for sentence in disk["warnings"]]
    output.answer(facts, lines)
    return 0


@spool.command
def verify(directory: Path, /, *, output: Output = TEXT) -> int:
    """Check every byte of every file, and that they follow from each other. Exit code 1 if anything is wrong.

    ```
    headrace spool verify /data/spool
    ```
    """
    from headrace.spool.survey import verify as check

    files, findings = check(directory)
    lines = [
        f["problem"] if f["seq"] is None else f"{f['split']} part {f['part']} file {f['seq']}: {f['problem']}"
        for f in findings
    ]
    lines.append(f"{files:,} files checked, {count_text(len(findings), 'problem')}")
    output.answer({"files": files, "findings": findings}, lines)
    return 1 if findings else 0


@spool.command
def quarantine(
    directory: Path, /, *,
    file: Annotated[int | None, Parameter(help="Set this file aside: it is kept, and its provider makes it again.")] = None,
    reason: Annotated[str, Parameter(help="Why; kept beside the file.")] = "",
    split: Annotated[str, Parameter(help="Of the file.")] = "train",
    part: Annotated[int, Parameter(help="Of the file.")] = 0,
    output: Output = TEXT,
) -> int:  # fmt: skip
    """List quarantined files with the reason. With --file, quarantine a file that no consumer has read yet.

    ```
    headrace spool quarantine /data/spool
    headrace spool quarantine /data/spool --file 7 --reason "made while the disk was failing"
    ```
    """
    from headrace.spool.survey import quarantined, set_aside

    if file is not None:
        set_aside(directory, file, reason, split=split, part=part)
    found = quarantined(directory)
    output.answer(found, [f"{f['split']} {f['file']}: {f['reason']}" for f in found] or ["nothing"])
    return 0


@spool.command
def purge(
    directory: Path, /, *,
    yes: Annotated[bool, Parameter(help="Do it; without this it is only said what would go.")] = False,
    output: Output = TEXT,
) -> int:  # fmt: skip
    """Empty a spool that no process uses: files, verdicts, quarantine, archives, positions and meta.

    ```
    headrace spool purge /data/spool --yes
    ```
    """
    from headrace.spool import purge_spool
    from headrace.spool.survey import describe

    facts = describe(directory)
    if facts["at_work"]:
        raise ConfigError(f"{directory} is in use by {next(iter(facts['at_work'].values()))}: stop that first")
    files = sum(entry["files"] for parts in facts["splits"].values() for entry in parts)
    if not yes:
        print(f"headrace spool purge: {directory} holds {files:,} files; say --yes to delete them", file=sys.stderr)
        return 1
    purge_spool(directory)
    output.answer({"deleted": files}, [f"{files:,} files deleted"])
    return 0
