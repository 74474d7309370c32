"""A pack made from a hub, shard by shard: the same bytes, room for one shard, nothing left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moet.checkpoints import Checkpoint
from moet.checkpoints.hub import HubShards, open_hub
from moet.errors import CheckpointError, PackError
from moet.pack import Pack, write_pack
from moet.quantize import QUANTIZERS
from tests.checkpoints.hub_server import HubServer, hub_server
from tests.fixtures.checkpoints import write_checkpoint

NAME = "owner/tiny"
MODEL = f"hf://{NAME}"
SHARDS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), "deepseek_v4", "mxfp4", shards=SHARDS, layers=4
    )


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("expected") / "pack"
    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, out, quantizer=QUANTIZERS["data-free"]())
    return out


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_server(model, NAME) as server:
        yield server


def same_pack(pack: Path, expected: Path) -> None:
    """The same layer files; the description differs in where the model came from."""
    names = sorted(path.name for path in expected.glob("layer-*"))
    assert sorted(path.name for path in pack.glob("layer-*")) == names
    for name in names:
        assert (pack / name).read_bytes() == (expected / name).read_bytes()


class Watched(HubShards):
    """Notes the most bytes of shards that were in the directory at once."""

    most = 0

    def fetch(self, file: str) -> None:
        super().fetch(file)
        present = self._directory.glob("*.safetensors")
        Watched.most = max(Watched.most, sum(path.stat().st_size for path in present))


def pack_from(hub: HubServer, tmp_path: Path, **options) -> Path:
    out = tmp_path / "pack"
    with open_hub(MODEL, tmp_path / "shards", endpoint=hub.url, **options) as checkpoint:
        write_pack(checkpoint, out, quantizer=QUANTIZERS["data-free"]())
        assert isinstance(checkpoint.shards, HubShards)
        checkpoint.shards.delete()
    return out


def test_the_same_pack_with_room_for_one_shard(hub, model, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("moet.checkpoints.hub.HubShards", Watched)
    pack = pack_from(hub, tmp_path)
    same_pack(pack, expected)
    found = Pack.open(pack).manifest.model
    assert (found.name, found.revision) == (NAME, hub.commit)
    assert found.source == Pack.open(expected).manifest.model.source
    largest = max(path.stat().st_size for path in model.glob("*.safetensors"))
    assert 0 < Watched.most <= largest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack"]


def test_shards_with_experts_are_downloaded_once(hub, model, tmp_path):
    pack_from(hub, tmp_path)
    with Checkpoint.open(model) as checkpoint:
        needed = {
            ref.file
            for name, ref in checkpoint.tensors.items()
            if checkpoint.is_expert_tensor(name)
        }
    whole = [file for verb, file, part in hub.requests if verb == "GET" and part is None]
    shards = [file for file in whole if file.endswith(".safetensors")]
    assert shards == sorted(needed)
    assert len(needed) < SHARDS  # those with dense tensors only need not be


def test_the_pack_of_the_hub_serves_the_same_checkpoint_on_disk(hub, model, tmp_path):
    """Its identity is the content's: headers by range requests are the headers on disk."""
    with Checkpoint.open(model) as checkpoint:
        Pack.open(pack_from(hub, tmp_path)).check_model(checkpoint)


def test_keep_downloads_into_the_cache_and_stays_there(hub, model, expected, tmp_path):
    pack = pack_from(hub, tmp_path, keep=True)
    same_pack(pack, expected)
    (snapshot,) = (tmp_path / "cache").glob("models--owner--tiny/snapshots/*")
    assert (snapshot / "config.json").exists()
    kept = {path.name for path in snapshot.glob("*.safetensors")}
    sent = dict(hub.sent)
    again = tmp_path / "again"
    again.mkdir()
    same_pack(pack_from(hub, again), expected)
    assert all(hub.sent[file] - sent[file] < 400_000 for file in kept)  # headers only
    assert {path.name for path in snapshot.glob("*.safetensors")} == kept


PACK = """
import sys
from pathlib import Path
from moet.checkpoints.hub import open_hub
from moet.pack import write_pack
from moet.quantize import QUANTIZERS
place, url = Path(sys.argv[1]), sys.argv[2]
with open_hub("hf://owner/tiny", place / "shards", endpoint=url) as checkpoint:
    report = write_pack(checkpoint, place / "pack", quantizer=QUANTIZERS["data-free"](), workers=1)
    checkpoint.shards.delete()
print(report.layers_resumed)
"""


def start(hub: HubServer, place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PACK, str(place), hub.url],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_run_resumes(hub, expected, tmp_path):
    """Killed in the middle of a download, with layers finished: these are not packed again."""
    hub.pace = 0.05
    run = start(hub, tmp_path)
    journal = tmp_path / "pack.partial" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = len(hub.requests)
    while not any("GET" in of for of in hub.requests[before:]):  # the next shard is under way
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "pack").exists()
    hub.pace = 0.0
    run = start(hub, tmp_path)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0
    assert int(output) >= 2
    same_pack(tmp_path / "pack", expected)
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"home"} == {"pack"}


def test_what_the_hub_does_not_have(hub, tmp_path):
    for name, words in [
        ("hf://owner/other", "the hub has no model owner/other"),
        ("hf://owner/tiny@0123", "the hub has no model owner/tiny, or not that revision"),
        ("hf://a/b/c", "no name of a model"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            open_hub(name, tmp_path / "shards", endpoint=hub.url)


def test_a_hub_that_fails_and_one_that_is_not_there(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits and tries again
    hub.broken = {f"model-00003-of-{SHARDS:05d}.safetensors"}
    with pytest.raises(
        CheckpointError, match=r"owner/tiny: the download failed.*`moet pack` resumes"
    ):
        open_hub(MODEL, tmp_path / "shards", endpoint=hub.url)
    with pytest.raises(CheckpointError, match="owner/tiny: "):
        open_hub(MODEL, tmp_path / "shards", endpoint="http://127.0.0.1:9")


def test_a_shard_that_changed_on_the_way_is_refused(hub, model, tmp_path):
    with open_hub(MODEL, tmp_path / "shards", endpoint=hub.url) as checkpoint:
        shards = checkpoint.shards
        file = list(shards.files)[1]
        shards._headers[file] = b"x" * len(shards._headers[file])
        with pytest.raises(CheckpointError, match="is not what owner/tiny has at"):
            shards.fetch(file)


def test_a_disk_without_room_for_a_shard(hub, tmp_path, monkeypatch):
    with open_hub(MODEL, tmp_path / "shards", endpoint=hub.url) as checkpoint:
        assert checkpoint.shards.room == max(map(checkpoint.shards.size, checkpoint.shards.files))
        checkpoint.shards.room = 1 << 60
        with pytest.raises(PackError, match="iB free"):
            write_pack(checkpoint, tmp_path / "pack", quantizer=QUANTIZERS["data-free"]())


def test_the_command(hub, expected, tmp_path):
    command = [sys.executable, "-m", "moet", "pack", MODEL, "-o", str(tmp_path / "p"), "--json"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout)["layers"] == 5
    same_pack(tmp_path / "p", expected)
    assert not (tmp_path / "p.shards").exists()
