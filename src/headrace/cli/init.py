"""headrace init FILES: write a first config for your files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.terminal import Output
from headrace.errors import ConfigError


def init(
    *files: Path,
    out: Annotated[Path, Parameter(help="The file to write; one that exists is left alone.")] = Path("run.toml"),
    tokenizer: Annotated[
        str | None, Parameter(help="A tokenizer.json, a folder, or a name of the local Hugging Face cache.")
    ] = None,
    quiet: Annotated[bool, Parameter(help="Print nothing but errors.")] = False,
) -> int:
    """Write a commented TOML file that trains on your files. Without files it reads built-in text.

    ```
    headrace init web/ books/
    headrace init web/part-0.jsonl.gz --tokenizer tokenizer.json --out web.toml
    ```
    """
    from headrace.files import publish
    from headrace.runs.init import draft_config

    text = draft_config(files, beside=out, tokenizer=tokenizer)
    try:
        publish(out, text.encode())
    except FileExistsError:
        raise ConfigError(f"{out} exists already: give another name with --out") from None
    Output(quiet=quiet).say(f"wrote {out}; next: headrace check {out}, headrace run {out}")
    return 0
