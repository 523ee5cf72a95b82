"""Objects of a store are read as files on disk are: the same texts and fingerprints, checked, and never waited for in vain.

Against two real servers on loopback, each a process of its own: moto's S3, and a small one that can be slow and can fail.
"""

import gzip
import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

import slow_server
from headrace.errors import ConfigError, DataChanged, DataError
from headrace.formats import object_store
from headrace.metrics import default_meter
from headrace.reduce import Columns, GramResult, gram
from headrace.reduce.shards import RowShards
from headrace.sources import Source, open_source

obstore = pytest.importorskip("obstore", reason="needs the extra [s3]")
from obstore.store import from_url  # noqa: E402

TEXTS = [f"row {i} " + "é\u2028" * (i % 50) for i in range(6000)]
LINES = [f'{{"text":"{text}"}}\n'.encode() for text in TEXTS]


@pytest.fixture(scope="module")
def moto():
    """The address of a real S3 server, in a process of its own."""
    pytest.importorskip("moto.server", reason="needs moto[server]")
    script = (
        "import sys, threading\n"
        "from moto.moto_server.threaded_moto_server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer('127.0.0.1', 0, verbose=False)\n"
        "server.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def bucket(moto, monkeypatch, request):
    """put(key, bytes) into a bucket of this test's own; its URL."""
    _, url = moto
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }
    for name, value in {**settings, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=10).close()
    store = from_url(f"s3://{name}")

    def put(key, data):
        obstore.put(store, key, data)

    put.url = f"s3://{name}"
    return put


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


def shards(folder: Path) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    table = pa.table({"n": range(6000), "text": TEXTS, "image": [os.urandom(200) for _ in range(6000)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=500)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    return {
        "a.jsonl": b"".join(LINES[:2000]),
        "b.jsonl.gz": gzip.compress(b"".join(LINES[2000:4000])),
        "c/é d.jsonl.zst": b"".join(pa.Codec("zstd").compress(b"".join(LINES[i : i + 500]), asbytes=True) for i in range(4000, 6000, 500)),
        "a.parquet": (folder / "a.parquet").read_bytes(),
        "a.arrow": (folder / "a.arrow").read_bytes(),
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["jsonl", "parquet", "arrow"])
def test_a_prefix_in_a_bucket_holds_what_the_same_folder_on_disk_holds(tmp_path, bucket, scheme):
    for key, data in shards(tmp_path / "d").items():
        (tmp_path / "d" / key).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / key).write_bytes(data)
        bucket(f"web/d/{key}", data)
    bucket("web/d/.hidden.jsonl", b"x")
    bucket("web/dd/other.jsonl", b"x")
    disk = open_source(
        Source(f"{scheme}:d", **({"split": "line"} if scheme == "txt" else {})), base=tmp_path, cache=tmp_path / "cache"
    )
    stored = open_source(
        Source(f"{scheme}:{bucket.url}/web/d", **({"split": "line"} if scheme == "txt" else {})),
        cache=tmp_path / "cache2",
    )
    assert stored.fingerprint() == disk.fingerprint()
    assert texts_of(stored) == texts_of(disk) == TEXTS
    [cached] = (tmp_path / "cache2" / "manifests").iterdir()
    written = cached.stat().st_ino
    again = open_source(
        Source(f"{scheme}:{bucket.url}/web/d", **({"split": "line"} if scheme == "txt" else {})),
        cache=tmp_path / "cache2",
    )
    assert cached.stat().st_ino == written
    assert texts_of(again) == TEXTS


def test_globs_and_single_objects_are_listed_in_bytewise_order(tmp_path, bucket):
    for key in ("w/2.jsonl", "w/10.jsonl", "w/x/1.jsonl", "w/x/y/1.jsonl", "w/é.jsonl", "w/x/1.txt", "w2/1.jsonl"):
        bucket(key, b'{"text":"%s"}\n' % key.encode())

    def listed(place):
        with open_source(Source(f"jsonl:{bucket.url}/{place}"), cache=tmp_path) as source:
            assert texts_of(source) == [
                f"{source.manifest.root}/{f.path}".removeprefix(f"{bucket.url}/") for f in source.manifest.files
            ]
            return [file.path for file in source.manifest.files]

    assert listed("w/*.jsonl") == ["10.jsonl", "2.jsonl", "é.jsonl"]
    assert listed("w/**/1.jsonl") == ["x/1.jsonl", "x/y/1.jsonl"]
    assert listed("w*/1.jsonl") == ["w2/1.jsonl"]
    assert listed("w/x/") == ["1.jsonl", "y/1.jsonl"]
    assert listed("w/2.jsonl") == ["2.jsonl"]
    for place, sentence in {
        "w/*.parquet": "no object matches",
        "nothing": "no object ends in .jsonl or .ndjson below",
    }.items():
        with pytest.raises(DataError, match=sentence):
            listed(place)


def test_an_object_that_was_replaced_is_refused_by_name_within_a_run_and_between_runs(tmp_path, bucket):
    bucket("web/a.jsonl", b"".join(LINES[:500]))
    spec = Source(f"jsonl:{bucket.url}/web/*.jsonl")

    def opened():
        return open_source(spec, cache=tmp_path / "cache", records=tmp_path / "run", chunk_bytes=5000)

    source = opened()
    texts_of(source)
    saved = source.fingerprint()
    bucket("web/a.jsonl", b"".join(LINES[:500]).replace(b"row 70 ", b"ROW 70 "))
    with pytest.raises(DataChanged, match=r"s3://.*/web/a.jsonl was replaced since it was listed"):
        source.read(0)
    other = opened()
    assert other.describe_change(saved)[0].startswith("a.jsonl changed")
    with pytest.raises(DataChanged, match=r"web/a.jsonl \(bytes .* changed since it was first read"):
        texts_of(other)


def test_wrong_names_and_wrong_credentials_are_one_sentence_at_once(tmp_path, bucket, moto, monkeypatch):
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"listing s3://no-such-bucket-here/x: there is no such bucket") as caught:
        open_source(Source("jsonl:s3://no-such-bucket-here/x/*.jsonl"), cache=tmp_path)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 20
    bucket("web/a.jsonl", LINES[0])
    with pytest.raises(DataError, match=r"there is nothing at"):
        open_source(Source(f"jsonl:{moto[1]}/{bucket.url[5:]}/nope.jsonl"), cache=tmp_path)
    with pytest.raises(ConfigError, match=r"the web cannot be listed, so 'http.*' must be one file"):
        open_source(Source(f"jsonl:{moto[1]}/{bucket.url[5:]}/*.jsonl"), cache=tmp_path)


@pytest.fixture
def slow(tmp_path, monkeypatch):
    (tmp_path / "store" / "b" / "web").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with slow_server.serving(tmp_path / "store") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def fill(tmp_path, count=3):
    for shard in range(count):
        (tmp_path / "store" / "b" / "web" / f"{shard}.jsonl").write_bytes(
            b"".join(LINES[shard * 300 : (shard + 1) * 300])
        )


def test_a_store_that_denies_access_is_not_asked_again(tmp_path, slow):
    fill(tmp_path)
    source = open_source(Source("jsonl:s3://b/web/*.jsonl"), cache=tmp_path / "cache")
    slow.slow(status=403, times=100)
    before = sum(slow.counts().values())
    with pytest.raises(
        DataError, match=r"reading s3://b/web/0.jsonl at byte 0: access is denied \(403\). Check the credentials"
    ):
        source.read(0)
    assert sum(slow.counts().values()) == before + 1


def test_errors_that_pass_are_tried_again_counted_and_waited_for_by_name(tmp_path, slow):
    fill(tmp_path)
    source = open_source(Source("jsonl:s3://b/web/*.jsonl"), cache=tmp_path / "cache")
    before = default_meter().totals().get("wait/source.retry/count", 0)
    slow.slow(status=503, times=3)
    assert texts_of(source) == TEXTS[:900]
    assert default_meter().totals()["wait/source.retry/count"] > before


def test_a_server_that_dies_is_a_named_error_by_the_deadline(tmp_path, slow, monkeypatch):
    monkeypatch.setattr(object_store, "DEADLINE", 2.0)
    fill(tmp_path)
    source = open_source(Source("jsonl:s3://b/web/*.jsonl"), cache=tmp_path / "cache")
    assert source.read(0)
    slow.kill()
    begin = time.monotonic()
    with pytest.raises(
        DataError, match=r"reading s3://b/web/1.jsonl at byte 0: .* times in \d s. Check that the store can be reached"
    ):
        source.read(1)
    assert time.monotonic() - begin < 15


def test_a_server_that_answers_late_is_a_named_error_by_the_deadline(tmp_path, slow, monkeypatch):
    monkeypatch.setattr(object_store, "DEADLINE", 2.0)
    fill(tmp_path, 1)
    source = open_source(Source("jsonl:s3://b/web/*.jsonl"), cache=tmp_path / "cache")
    slow.slow(each=40)
    begin = time.monotonic()
    with pytest.raises(
        DataError, match=r"reading s3://b/web/0.jsonl at byte 0: .* Check that the store can be reached"
    ):
        source.read(0)
    assert time.monotonic() - begin < 15


def test_opening_a_known_source_reads_no_object_and_the_first_read_of_each_is_as_slow_as_its_server(tmp_path, slow):
    fill(tmp_path)
    spec = Source("jsonl:s3://b/web/*.jsonl")
    open_source(spec, cache=tmp_path / "cache")
    before = slow.counts()
    slow.slow(first=1.0)
    source = open_source(spec, cache=tmp_path / "cache")
    assert slow.counts() == before
    times = []
    for _ in range(2):
        begin = time.monotonic()
        source.read(0)
        times.append(time.monotonic() - begin)
    assert times[0] >= 1.0 > times[1]


def test_a_forked_process_is_refused_with_a_sentence_where_it_would_wait_for_ever(tmp_path, slow):
    fill(tmp_path, 1)
    script = (
        "import os, sys; from pathlib import Path; from headrace.sources import Source, open_source\n"
        "source = open_source(Source('jsonl:s3://b/web/*.jsonl'), cache=Path(sys.argv[1]))\n"
        "source.read(0)\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        source.read(0)\n"
        "    except Exception as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "cache"], capture_output=True, text=True, timeout=100, check=True
    )
    assert 'obstore does not survive. Start worker processes with the method "spawn"' in done.stdout


def test_one_object_on_the_web_is_a_source(tmp_path, slow):
    fill(tmp_path, 1)
    with open_source(Source(f"jsonl:{slow.url}/b/web/0.jsonl"), cache=tmp_path / "cache") as source:
        assert texts_of(source) == TEXTS[:300]
        assert source.name == "0"
    (tmp_path / "store" / "b" / "web" / "0.jsonl").write_bytes(b"{}\n")
    with pytest.raises(DataChanged, match=r"http://.*/b/web/0.jsonl was replaced"):
        source.read(0)


def test_without_obstore_a_store_is_a_sentence_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ConfigError, match=r"reading s3://b needs obstore, which is not installed: pip install 'headrace\[s3\]'"
    ):
        open_source(Source("jsonl:s3://b/x/*.jsonl"), cache=tmp_path)


# ---------------------------------------------------------------------------------------------------- Gram


def row_shards(folder: Path, times: int = 1) -> dict[str, list[str]]:
    """Files of rows in every format below a folder; their names by format."""
    x = np.random.default_rng(3).normal(size=(3000 * times, 5)).astype(np.float32)
    folder.mkdir()
    np.save(folder / "0.npy", x[: 1000 * times])
    np.save(folder / "1.npy", x[1000 * times :])
    np.save(folder / "2.npy", x[:0])
    safetensors.numpy.save_file(
        {"hidden": x[: 1700 * times], "label": x[: 1700 * times, :1].copy()}, folder / "0.safetensors"
    )
    safetensors.numpy.save_file(
        {"hidden": x[1700 * times :], "label": x[1700 * times :, :1].copy()}, folder / "1.safetensors"
    )
    flat = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 5)
    pq.write_table(pa.table({"hidden": flat, "label": x[:, 0]}), folder / "0.parquet", row_group_size=256 * times)
    return {s: sorted(p.name for p in folder.glob(f"*.{s}")) for s in ("npy", "safetensors", "parquet")}


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "parquet"])
def test_rows_of_objects_in_a_bucket_are_those_of_the_files_on_disk(tmp_path, bucket, suffix):
    names = row_shards(tmp_path / "acts")[suffix]
    for name in names:
        bucket(f"run/acts/{name}", (tmp_path / "acts" / name).read_bytes())
    bucket("run/acts/notes.txt", b"x")
    fields = {} if suffix == "npy" else {"field": "hidden", "targets": "label"}

    def rows(*shards):
        opened = RowShards.open(shards, **fields)
        found = opened.read(0, opened.n_rows)
        return opened.n_rows, found.x.tobytes(), None if found.y is None else found.y.tobytes()

    disk = rows(str(tmp_path / "acts" / f"*.{suffix}"))
    assert disk[0] == 3000
    for place in ("run/acts", f"run/acts/*.{suffix}", f"run/**/*.{suffix}"):
        assert rows(f"{bucket.url}/{place}") == disk
    assert rows(*(f"{bucket.url}/run/acts/{name}" for name in names)) == disk
    if suffix == "safetensors":  # a result that lies among the shards is no shard
        GramResult(columns=Columns(width=1), n_rows=1, full=np.eye(2), about={}).save(tmp_path / "g.safetensors")
        bucket("run/acts/gram.safetensors", (tmp_path / "g.safetensors").read_bytes())
        assert rows(f"{bucket.url}/run/acts") == disk


def test_the_gram_of_objects_is_that_of_the_files_on_disk_and_a_replaced_object_is_refused(tmp_path, bucket, headrace):
    names = row_shards(tmp_path / "acts")["npy"]
    for name in names:
        bucket(f"run/acts/{name}", (tmp_path / "acts" / name).read_bytes())
    words = ("gram", f"{bucket.url}/run/acts", "--chunk", "300", "--workers", "1", "--out", "g.safetensors")
    done = headrace(*words, "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, rows = json.loads(done.stdout), [np.load(tmp_path / "acts" / name) for name in names]
    assert (found["n_rows"], found["state"]) == (3000, "reduced")
    assert found["sha256"] == gram(np.concatenate(rows), chunk_size=300).sha256
    assert json.loads(headrace(*words, "--format", "json", cwd=tmp_path).stdout)["state"] == "complete"
    bucket("run/acts/0.npy", (tmp_path / "acts" / "0.npy").read_bytes()[:-4] + b"\0\0\0\0")
    done = headrace(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "holds the sum of something else (data was" in done.stderr


def test_an_object_that_is_replaced_under_a_pass_is_refused_at_the_next_read(tmp_path, bucket):
    row_shards(tmp_path / "acts", times=500)  # more than is read ahead
    for suffix in ("npy", "safetensors", "parquet"):
        raw = (tmp_path / "acts" / f"0.{suffix}").read_bytes()
        bucket(f"acts/0.{suffix}", raw)
        shards = RowShards.open([f"{bucket.url}/acts/0.{suffix}"], field=None if suffix == "npy" else "hidden")
        before = shards.stamps()
        assert len(shards.read(0, 200).x) == 200
        bucket(f"acts/0.{suffix}", raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(DataChanged, match=rf"acts/0.{suffix} was replaced since it was listed"):
            shards.read(450_000, 450_010)
        assert shards.stamps() != before


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("a.npy", b"", "it begins with b''"),
        ("a.npy", b"\x93NUMPY\x01\0\xff\xff", "cannot be read as .npy"),
        ("a.npy", "short", "claims 96 bytes, 88 are there"),
        ("a.npy", "columns", "Save np.ascontiguousarray"),
        ("a.npy", "objects", "Save it with a numeric dtype"),
        ("a.safetensors", b"\xff" * 8, "its header claims"),
        ("a.parquet", b"PAR1PAR1", "cannot be read as .parquet"),
        ("a.txt", b"x", "is none of .npy, .safetensors, .parquet"),
    ],
)
def test_an_object_that_holds_no_rows_is_named(bucket, name, data, sentence):
    made = io.BytesIO()
    if isinstance(data, str):
        kinds = {"columns": np.asfortranarray(np.ones((4, 3))), "objects": np.array([[{}]], object)}
        np.save(made, kinds.get(data, np.ones((4, 3))))
        data = made.getvalue()[: -8 if data == "short" else None]
    bucket(name, data)
    with pytest.raises((DataError, ConfigError), match=rf"{name}.*{sentence}"):
        RowShards.open([f"{bucket.url}/{name}"])


def test_places_in_stores_that_hold_no_shards_are_one_sentence(tmp_path, bucket, headrace):
    for place, sentence in (
        (f"{bucket.url}/none", "no object ends in .npy or .safetensors or .parquet below"),
        (f"{bucket.url}/none/*.npy", "no object matches"),
        ("s4://b/x.npy", "there is no store s4://. There are s3://"),
    ):
        done = headrace("gram", place, cwd=tmp_path)
        assert done.returncode == 1
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
