"""The documentation site builds without a warning, and its pages fetch nothing from a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install 'headrace[docs]'")
pytest.importorskip("mkdocstrings", reason="the site needs mkdocstrings: pip install 'headrace[docs]'")

FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]+src=["']?https?:|<link[^>]+rel=["']?(?:stylesheet|preconnect)[^>]+https?:"""
)


@pytest.mark.timeout(300)
def test_the_site_builds_strictly_and_its_pages_fetch_nothing(repository, tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=repository,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert {"index.html", "guides/text.html", "reference/config.html"} <= pages.keys()
    assert not [name for name, text in pages.items() if FETCHED.search(text)]
    assert 'id="headrace.Loader.state_dict"' in pages["reference/api.html"]
