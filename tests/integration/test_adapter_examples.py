"""The examples do what they say: each runs here with few steps, and the Trainer also on two ranks.

Run as a script, this file is the process in which the Trainer runs:  test_adapter_examples.py EXAMPLES SPEC FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.errors import HeadraceError

STEPS = 4
NEEDS = {"stateful_dataloader": "torchdata", "hf_trainer": "transformers"}


@pytest.fixture
def spec(write_jsonl) -> str:
    texts = [f"page {i}. " + "the race carries water to the wheel. " * (i % 23) for i in range(600)]
    return f"jsonl:{write_jsonl('pages.jsonl', texts)}"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("name", ["plain_loop", "torch_dataloader", "stateful_dataloader"])
def test_an_example_shows_equal_digests(name, spec, repository, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"examples/{name}.py needs {NEEDS[name]}: pip install {NEEDS[name]}")
    example = runpy.run_path(str(repository / "examples" / f"{name}.py"))
    example["main"](["--steps", f"{STEPS}", "--data", spec])
    digests = re.findall(r"^digest .*\b([0-9a-f]{32})$", capsys.readouterr().out, re.MULTILINE)
    assert len(digests) >= 2
    assert len(set(digests)) == 1


@pytest.mark.parametrize("name", ["plain_loop", "torch_dataloader", "stateful_dataloader", "hf_trainer"])
def test_an_example_can_be_read_in_one_sitting(name, repository):
    assert len((repository / "examples" / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_says_what_to_install(name, repository, monkeypatch):
    for module in ("torchdata.stateful_dataloader", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=rf"this example needs {NEEDS[name]}.*pip install {NEEDS[name]}"):
        runpy.run_path(str(repository / "examples" / f"{name}.py"))


def test_the_trainer_resumes_with_the_same_data_and_losses_on_one_rank_and_on_two(spec, repository, tmp_path):
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip("examples/hf_trainer.py needs transformers and accelerate: pip install transformers accelerate")
    done = subprocess.run(
        [sys.executable, __file__, str(repository / "examples"), spec, str(tmp_path)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # One rank, as the example prints it.
    digests = re.findall(r"^digest .*\b([0-9a-f]{32})$", done.stdout, re.MULTILINE)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    # Two ranks: the same data as one loader for both, whether resumed or not, and nothing of it twice.
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert first["straight"] == first["resumed"] == second["straight"] == second["resumed"] == expected["digest"]
    assert first["losses"]["straight"] == first["losses"]["resumed"]
    assert len(first["losses"]["straight"]) == STEPS
    assert first["seen"] != second["seen"]
    assert sorted(first["seen"] + second["seen"]) == expected["seen"]
    assert first["early"] == second["early"] == 2, "the dataset was made before the ranks were joined"
    assert "split it a second time" in first["refused"]
    assert "holds no position of the data" in first["foreign"]
    assert "checkpoint-4 was saved without the data's position" in first["late"]
    assert "attached already" in first["twice"]
    for part in (
        "2 rows, and the Trainer expects 4",
        'labels="hf"',
        "dataloader_num_workers=1",
        "auto_find_batch_size",
    ):
        assert part in first["wrong"]


# ------------------------------------------------------------------------------------ the Trainer's process


def two_ranks(example: dict, spec: str, folder: Path, rank: int, port: int) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    import torch.distributed as dist
    from transformers import Trainer

    import headrace as hr

    told: dict = {"losses": {}, "seen": []}
    shifted = hr.TorchDataset(hr.TextDataset(spec, seq_len=64), global_batch_size=4)
    straight = example["new_trainer"](spec, STEPS, folder)
    loader = straight.get_train_dataloader()
    collate = loader.collate_fn

    def note_and_collate(batch):
        told["seen"] += batch["sample_index"].tolist()
        return collate(batch)

    loader.collate_fn = note_and_collate
    straight.train()
    resumed = example["new_trainer"](spec, STEPS, folder)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    for name, trainer in (("straight", straight), ("resumed", resumed)):
        told[name] = trainer.train_dataset.loader.gather_state()["body"]["digest"]
        told["losses"][name] = example["losses"](trainer)
    told["early"] = shifted.loader.world_size
    # Without attach_to_trainer Accelerate would deal this rank's share out again.
    bare = Trainer(model=straight.model, args=straight.args, train_dataset=straight.train_dataset)
    bare.accelerator.dataloader_config.dispatch_batches = False
    told["refused"] = refusal(lambda: next(iter(bare.get_train_dataloader())))
    told["twice"] = refusal(lambda: hr.attach_to_trainer(straight))
    straight.args.dataloader_num_workers, straight.args.auto_find_batch_size = 1, True
    bare.train_dataset = shifted
    told["wrong"] = refusal(lambda: hr.attach_to_trainer(bare))
    # A checkpoint that a later callback asks for, when the data has moved on.
    next(iter(straight.train_dataset))
    position = straight.callback_handler.callbacks[-1]
    told["late"] = refusal(lambda: position.on_save(straight.args, straight.state, straight.control))
    # A checkpoint of a Trainer that was not attached.
    foreign = SimpleNamespace(global_step=2, stateful_callbacks={})
    told["foreign"] = refusal(lambda: type(position)().on_train_begin(straight.args, foreign, straight.control))
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except HeadraceError as error:
        return str(error)
    return "not refused"


def main(examples: str, spec: str, folder: Path) -> int:
    example = runpy.run_path(f"{examples}/hf_trainer.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    import torch._dynamo  # noqa: F401  (which every optimizer imports when it is made)

    children = []
    for rank in range(2):  # forked before anything runs here: a process with threads cannot be
        child = os.fork()
        if child == 0:
            signal.alarm(90)  # ends with the test, whatever the other rank does
            try:
                two_ranks(example, spec, folder, rank, port)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
            return 1
    example["main"](["--steps", f"{STEPS}", "--data", spec])

    import headrace as hr

    data = hr.TextDataset(spec, tokenizer="sample", seq_len=64, seed=7)
    with hr.Loader(data, global_batch_size=8) as loader:
        seen = sorted(g for _ in range(STEPS) for g in next(loader)["sample_index"].tolist())
        (folder / "expected.json").write_text(json.dumps({"digest": loader.digest, "seen": seen}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
