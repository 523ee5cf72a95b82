"""The command and its errors: one sentence and exit code 1, or 2 for a call that cannot be parsed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from headrace import __version__
from headrace.errors import HeadraceError

app = App(
    name="headrace",
    default_parameter=Parameter(negative=()),
    version=f"headrace {__version__}",
    help="""Carries data to the training loop: exact order, small cursors, named waits.

Start with `headrace run quickstart`, or `headrace init` for your files. Every verb has `--help` with an example, `--format json` for
machines and `--quiet`. An error is one sentence and exit code 1 (2: the call itself is wrong); `--debug` shows where it
came from.""",
)
_DOTTED = re.compile(r"--[A-Za-z_][\w-]*(\.[\w-]+)+(=.*)?", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point. Leaves with the verb's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = with_settings([w for w in words if w != "--debug"])
    verb = next((w for w in words if not w.startswith("-")), "")
    try:
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        known = f"headrace {verb}" if verb in app else "headrace"
        _say(f"{known}: {_one_line(error)} (see {known} --help)")
        sys.exit(2)
    except HeadraceError as error:
        if debug:
            raise
        for line in str(error).splitlines():
            _say(f"headrace {verb}: {_whose()}{line}")
        sys.exit(1)
    except BrokenPipeError:
        # The reader went away (`| head`): not our failure, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        _say(f"headrace {verb}: {_whose()}{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        _say(f"headrace {verb}: interrupted")
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def with_settings(words: Sequence[str]) -> list[str]:
    """`--train.lr 3e-4` and `--train.lr=3e-4` as `--set train.lr=3e-4`, which the verbs take."""
    plain: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _DOTTED.fullmatch(word):
            plain.append(word)
            continue
        setting = word[2:]
        if "=" not in word and at < len(words) and not words[at].startswith("--"):
            setting += f"={words[at]}"
            at += 1
        plain += ["--set", setting]
    return plain


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _whose() -> str:
    """Under torchrun several processes speak at once."""
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    return f"rank {rank}: " if rank is not None and ranks != "1" else ""


Settings = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        consume_multiple=False,
        show_default=False,
        help="One key of the config: KEY=VALUE. `--train.lr 3e-4` is short for `--set train.lr=3e-4`. May be repeated.",
    ),
]


def overrides(settings: Sequence[str]) -> tuple[str, ...]:
    """What `load_config` takes."""
    return tuple(f"--{s}" for s in settings)


def names_sources(changed: Sequence[str]) -> bool:
    """Whether the environment or an override names a source, so that no config file is needed."""
    return bool(os.environ.get("DATASET_SPECS", "").strip()) or any(c.startswith("--source.") for c in changed)


def no_config(verb: str, otherwise: str = "") -> int:
    """Say that a call names neither a config nor a source; the exit code of a wrong call."""
    _say(
        f"headrace {verb}: give a CONFIG, as in `headrace {verb} run.toml`{otherwise}, or sources in the environment, as in "
        f"`DATASET_SPECS='jsonl:web/*.jsonl' headrace {verb}` (see headrace {verb} --help)"
    )
    return 2
