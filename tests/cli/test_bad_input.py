"""Bad input through the command line: one clear message, no traceback, nothing half-written."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Ran
from tests.fixtures.checkpoints import write_checkpoint

Moet = Callable[..., Ran]


def refused(ran: Ran, *names: str) -> None:
    assert ran.code == 1, ran.out + ran.err
    assert ran.err.count("error:") == 1, ran.err
    assert "Traceback" not in ran.err + ran.out
    flat = " ".join(ran.err.split())
    for name in names:
        assert name in flat, ran.err


def test_no_such_model(moet: Moet, tmp_path: Path) -> None:
    refused(moet("pack", tmp_path / "nothing", "-o", tmp_path / "p"), "nothing", "hf download")
    assert list(tmp_path.iterdir()) == []


def test_missing_shard(moet: Moet, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", format="nvfp4")
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(moet("pack", model, "-o", tmp_path / "p"), shard.name)
    assert not (tmp_path / "p").exists()
    assert not (tmp_path / "p.partial").exists()


def test_truncated_shard(moet: Moet, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", format="nvfp4")
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(moet("pack", model, "-o", tmp_path / "p"), shard.name)
    assert not (tmp_path / "p.partial").exists()


def test_unknown_architecture(moet: Moet, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", config={"architectures": ["MysteryForCausalLM"]})
    refused(moet("pack", model, "-o", tmp_path / "p"), "MysteryForCausalLM", "Qwen3MoeForCausalLM")


def test_a_level_without_its_calibration(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    ran = moet("pack", checkpoint, "-o", tmp_path / "p", "--level", "2")
    refused(ran, "level 2 needs a calibration", "moet calibrate")
    assert not (tmp_path / "p.partial").exists()


def test_a_gpu_that_is_not_there(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is")
    ran = moet("pack", checkpoint, "-o", tmp_path / "p", "--device", "cuda")
    refused(ran, "no NVIDIA GPU", "--device cpu")


def test_output_is_taken(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "letter.txt").write_text("mine")
    refused(moet("pack", checkpoint, "-o", tmp_path / "p"), str(tmp_path / "p"))
    assert (tmp_path / "p" / "letter.txt").read_text() == "mine"


def test_output_cannot_be_written(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(moet("pack", checkpoint, "-o", tmp_path / "file" / "p"), "file")


def test_pack_of_another_model(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", format="nvfp4", seed=1, experts=16)
    assert moet("pack", other, "-o", tmp_path / "p").code == 0
    refused(moet("serve", checkpoint, "--pack", tmp_path / "p", "--port", _free()), "other")


def test_damaged_pack_is_not_served(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    moet("pack", checkpoint, "-o", tmp_path / "p")
    text = (tmp_path / "p" / "moet.json").read_text()
    (tmp_path / "p" / "moet.json").write_text(text.replace('"top_k": 2', '"top_k": 3'))
    refused(moet("serve", checkpoint, "--pack", tmp_path / "p", "--port", _free()), "moet.json")


def test_unfinished_pack_is_not_served(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    moet("pack", checkpoint, "-o", tmp_path / "p")
    shutil.move(tmp_path / "p", tmp_path / "p.partial")
    (tmp_path / "p.partial" / "moet.json").unlink()
    ran = moet(
        "serve", checkpoint, "--pack", tmp_path / "p.partial", "--no-make-pack", "--port", _free()
    )
    refused(ran, "p.partial", "moet pack")


def test_port_is_taken(moet: Moet, checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(
            moet("serve", checkpoint, "--host", "127.0.0.1", "--port", port), str(port), "--port"
        )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--set", "bsae_pool=1"], ["bsae_pool", "base_pool"]),
        (["--set", "io_threads"], ["io_threads", "KEY=VALUE"]),
        (["--set", "io_threads=0"], ["io_threads"]),
        (["--policy", "best"], ["best", "lru"]),
        (["--base-pool", "much"], ["base_pool", "much"]),
        (["--additional-config", "{"], ["--additional-config"]),
        (["--additional-config", '{"moet": {"pool": 3}}'], ["pool"]),
        (["--additional_config", '{"moet": {"pool": 3}}'], ["pool"]),
        (["--additional-config", '{"moet": 5}'], ["mapping", "base_pool"]),
        (["--additional-config={}", "--additional-config", "{}"], ["twice"]),
        (["--port", "http"], ["--port"]),
        (["--quantization", "fp8"], ["--quantization", "moet", "vllm serve"]),
        (["--quantization=fp8"], ["--quantization=fp8", "vllm serve"]),
        (["-q", "fp8"], ["-q", "vllm serve"]),
        (["-q=fp8"], ["-q=fp8", "vllm serve"]),
        (["-qfp8"], ["-qfp8", "vllm serve"]),
        (["--quantization", "moet", "--quantization"], ["--quantization", "vllm serve"]),
    ],
)
def test_impossible_settings(
    moet: Moet,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    names: list[str],
) -> None:
    monkeypatch.setattr("moet.cli.serve.find_pack", lambda *_, **__: Path("pack"))
    monkeypatch.setattr("moet.cli.serve.os.execve", lambda *_: None)  # would end these tests
    refused(moet("serve", checkpoint, *arguments), *names)


def test_no_pack_and_none_to_be_made(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    ran = moet("serve", checkpoint, "--pack", tmp_path / "p", "--no-make-pack", "--port", _free())
    refused(ran, "moet pack")


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_bench_of_nothing_or_of_two_things(moet: Moet, checkpoint: Path) -> None:
    refused(moet("bench"), "MODEL", "--url")
    refused(moet("bench", checkpoint, "--url", "http://127.0.0.1:1"), "MODEL", "--url")
    refused(moet("bench", checkpoint, "--streams", "1,x"), "--streams 1,x", "1,8")
    refused(moet("bench", checkpoint, "--port", "8000"), "--port", "Leave it out")


def test_bench_of_a_server_that_is_not_there(moet: Moet) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        refused(moet("bench", "--url", url), url, "address")
