"""A split that lies on the hub as parquet is read by ranges: the first batch comes before all of it is fetched."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DataError
from headrace.loader import Loader, TextDataset

pytest.importorskip("obstore", reason="needs the extra [s3]")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS, GROUPS, ROWS = 4, 32, 64


class Hub(ThreadingHTTPServer):
    """As much of the hub as a reader of public datasets meets: a listing, and files that lie behind a redirection."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.served = 0
        self.status = 200
        """Of the listing."""


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        resolve = f"/datasets/org/name/resolve/{COMMIT}/"
        if path == "/api/datasets/org/name":
            files = [p for p in self.server.folder.rglob("*") if p.is_file()]
            listed = [{"rfilename": str(p.relative_to(self.server.folder)), "size": p.stat().st_size} for p in files]
            self._answer(self.server.status, json.dumps({"sha": COMMIT, "siblings": listed}).encode())
        elif path.startswith(resolve):
            self._answer(302, b"", location=f"/cdn/{path.removeprefix(resolve)}")
        elif path.startswith("/cdn/"):
            data = (self.server.folder / path.removeprefix("/cdn/")).read_bytes()
            wanted = self.headers.get("Range", "")
            if wanted:
                first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
                part = data[first : last + 1]
                self._answer(
                    206, part, content_range=f"bytes {first}-{first + len(part) - 1}/{len(data)}", etag='"cdn"'
                )
            else:
                self._answer(200, data, etag='"cdn"')
        else:
            self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.server.served += len(body)
        self.send_response(status)
        for name, value in {**headers, "content_length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    for shard in range(SHARDS):
        texts = [f"document {shard} {i} " + "word " * 1200 for i in range(GROUPS * ROWS)]
        name = f"data/train-{shard:05}-of-{SHARDS:05}.parquet"
        pq.write_table(
            pa.table({"text": texts}), folder / name, row_group_size=ROWS, compression="none", use_dictionary=False
        )
    pq.write_table(pa.table({"text": ["held out"]}), folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A dataset\n")
    with Hub(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()


def loader(tmp_path, spec="hf:org/name", cache="cache") -> Loader:
    data = TextDataset(
        [f"{spec}?name=web"], seq_len=256, lanes=2, window_blocks=4, base=tmp_path, cache=tmp_path / cache
    )
    return Loader(data, global_batch_size=2, tokenizer_workers=1, prefetch_batches=0)


def test_the_first_batch_comes_before_the_split_is_fetched_and_its_data_is_that_of_a_copy(tmp_path, hub):
    total = sum(path.stat().st_size for path in hub.folder.rglob("*.parquet"))
    with loader(tmp_path) as remote, loader(tmp_path, "hf:hub", "other") as copy:
        assert remote.data.sources[0].manifest.rows == SHARDS * GROUPS * ROWS
        assert (next(remote)["input_ids"] == next(copy)["input_ids"]).all()
        assert hub.served < total / 2
        assert not list((tmp_path / "cache").glob("hf/*"))
        for _ in range(20):
            assert (next(remote)["input_ids"] == next(copy)["input_ids"]).all()
        copy.load_state_dict(remote.state_dict())  # downloaded meanwhile: the same data to a cursor
        assert copy.step == 21
        assert (next(remote)["input_ids"] == next(copy)["input_ids"]).all()


def test_another_split_is_found_on_the_hub_and_one_that_is_not_there_is_named(tmp_path, hub):
    data = TextDataset(["hf:org/name?split=test"], seq_len=16, lanes=1, cache=tmp_path / "cache")
    assert data.sources[0].read(0) == ["held out"]
    with pytest.raises(DataError, match=r"no split 'valid'; it has train, test"):
        TextDataset(["hf:org/name?split=valid"], seq_len=16, lanes=1, cache=tmp_path / "cache")


def test_a_hub_that_fails_for_the_moment_stops_the_run_rather_than_giving_a_rank_another_order(tmp_path, hub):
    hub.status = 503
    with pytest.raises(DataError, match=r"'org/name' \(HTTPError: HTTP Error 503"):
        loader(tmp_path)
