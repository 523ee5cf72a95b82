"""Every file is opened by `headrace.files`: `open_regular` and what is built on it for reading, `publish` and `open_inside` for writing."""

from __future__ import annotations

import ast
from pathlib import Path

import headrace

SOURCE = Path(headrace.__file__).parent
OPENING = {
    "open", "os.open", "io.open", "os.fdopen", "np.load", "np.memmap", "np.fromfile", "torch.load", "zipfile.ZipFile", "os.truncate",
    "shutil.copyfile", "shutil.copy", "tomllib.load", "json.load", "pickle.load", "pickle.loads",
}  # fmt: skip
WORDS = {name.rpartition(".")[2] + "(" for name in OPENING} | {"read_text", "read_bytes", "write_text", "write_bytes"}
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
ALLOWED = {
    "files.py": "the door itself",
    "formats/byte_file.py": "the same flags and checks; raises OSError, which callers retry on a slow file system",
    "order/fingerprint.py": "a file that the caller has listed as a regular one",
    "runtime/locks.py": "O_NOFOLLOW, O_NONBLOCK and a check of the kind; the folder has to exist",
    "spool/records.py": "O_NOFOLLOW, O_NONBLOCK and a check of the kind; a missing file is not made",
    "spool/batch_file.py": "torch.load and zipfile take paths; the kind was checked",
    "spool/folder.py": "a new temporary file, O_EXCL",
    "rollouts/batch_files.py": "a new temporary file, O_EXCL",
    "formats/numpy_arrays.py": "zipfile over a ByteFile",
    "provenance/steps.py": "copies of files that os.scandir called regular, into a new temporary folder",
    "sources/samples.py": "modules of Python's own library",
    "cli/app.py": "os.devnull",
    "ui/static_page.py": "files of the package",
    "spool/file_system.py": "/proc",
    "train/lm.py": "/sys/fs/cgroup",
}


def openings(tree: ast.AST):
    """Calls that open a file. `open(descriptor)` around a call of the door opens nothing."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        inner = node.args[0] if node.args else None
        through = isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("open_regular", "open_inside")
        through |= isinstance(inner, ast.Name) and inner.id == "fd"
        if (name in OPENING and not through) or (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            yield f"{node.lineno}: {name}"


def test_no_file_is_opened_but_by_the_door():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        lines = list(openings(ast.parse(text))) if any(word in text for word in WORDS) else []
        if lines:
            found[path.relative_to(SOURCE).as_posix()] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert sorted(set(ALLOWED) - set(found)) == [], "these open nothing any more: take them off the list"


def test_the_search_finds_what_it_should():
    text = "open(p)\nos.open(p, f)\nPath(p).read_text()\nnp.load(p)\nopen(open_regular(p), 'rb')\nself.store.open(3)"
    assert [line.partition(":")[0] for line in openings(ast.parse(text))] == ["1", "2", "3", "4"]
