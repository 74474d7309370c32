"""The calibration file: what goes in comes out, runs resume, and nothing foreign is taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from moet.calibrate import (
    Calibration,
    CalibrationWriter,
    Metadata,
    SampleSink,
    Windows,
    cut_windows,
    read_text,
    read_tokens,
)
from moet.checkpoints import Checkpoint
from moet.errors import CalibrationError
from moet.pack.identity import model_of
from tests.fixtures.checkpoints import write_checkpoint

HIDDEN, EXPERTS, TOP_K, LAYERS = 128, 8, 2, (1, 2)
WINDOW, COUNT = 24, 5


@dataclass
class Case:
    checkpoint: Checkpoint
    metadata: Metadata
    windows: Windows

    def write(self, writer: CalibrationWriter, first: int, last: int) -> None:
        """Runs windows as a worker does: in pieces, layer after layer."""
        with SampleSink(writer.partial, writer.layout) as sink:
            for window in range(first, last):
                sink.begin(window)
                for piece in range(2):
                    for layer in LAYERS:
                        x, ids, weights = samples(layer, window)
                        part = slice(0, 10) if piece == 0 else slice(10, None)
                        sink.add(layer, x[part], ids[part], weights[part])
                for layer in LAYERS:
                    assert sink.seen[layer] == WINDOW
                    sink.power(layer, 10.0 * layer + window)
                sink.sync()
                writer.record(window + 1)


def samples(layer: int, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * layer + window)
    x = torch.randn(WINDOW, HIDDEN, generator=rng)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=rng)[:TOP_K] for _ in range(WINDOW)])
    return x, ids.int(), torch.rand(WINDOW, TOP_K, generator=rng)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = write_checkpoint(tmp_path_factory.mktemp("model") / "m", hidden=HIDDEN, layers=3)
    checkpoint = Checkpoint.open(path)
    windows = Windows(np.arange(COUNT * WINDOW, dtype=np.int32).reshape(COUNT, WINDOW))
    metadata = Metadata(
        schema_version=1,
        writer="moet test",
        model=model_of(checkpoint),
        hidden=HIDDEN,
        experts=EXPERTS,
        top_k=TOP_K,
        layers=LAYERS,
        windows=COUNT,
        window=WINDOW,
        tokens=windows.digest,
    )
    return Case(checkpoint, metadata, windows)


@pytest.fixture(scope="module")
def finished(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "c"
    with CalibrationWriter(out, case.metadata, case.windows) as writer:
        case.write(writer, 0, COUNT)
        writer.finish()
    assert [path.name for path in out.parent.iterdir()] == ["c"]
    return out


def test_what_was_written_is_read(case: Case, finished: Path) -> None:
    calibration = Calibration.open(finished)
    calibration.check_model(case.checkpoint)
    assert np.array_equal(calibration.windows().ids, case.windows.ids)
    for layer in LAYERS:
        parts = [samples(layer, window) for window in range(COUNT)]
        x, ids, weights = (torch.cat(p) for p in zip(*parts, strict=True))
        found = calibration.layer(layer)
        assert found is not None
        assert torch.equal(found.x, x.bfloat16())
        assert torch.equal(found.ids, ids)
        assert torch.equal(found.weights, weights)
        for expert in range(EXPERTS):
            where = ids == expert
            assert calibration.array(layer, "counts")[expert] == int(where.sum())
            total = weights[where].double()
            assert calibration.array(layer, "weight_sum")[expert] == pytest.approx(total.sum())
            assert calibration.array(layer, "weight_square_sum")[expert] == pytest.approx(
                total.square().sum()
            )
        share = (weights.max(1).values / weights.sum(1)).numpy()
        assert np.array_equal(
            calibration.array(layer, "confidence"), np.histogram(share, 20, (0, 1))[0]
        )
        assert calibration.array(layer, "stream_power").tolist() == [
            10.0 * layer + window for window in range(COUNT)
        ]
        w = weights.double().square().sum(1)
        rows = x.bfloat16().double()
        moment = (rows * w[:, None]).T @ rows / w.sum()
        assert torch.allclose(found.second_moment.double(), moment, atol=1e-5)
    assert calibration.layer(3) is None


def test_any_safetensors_reader_opens_it(finished: Path) -> None:
    with safe_open(finished, framework="pt") as file:
        assert file.get_tensor("layers.1.inputs").shape == (COUNT * WINDOW, HIDDEN)
        assert torch.equal(file.get_tensor("layers.2.experts")[:WINDOW], samples(2, 0)[1])
        assert "moet" in file.metadata()


def test_a_stopped_run_resumes_to_the_same_bytes(
    case: Case, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "c"
    with CalibrationWriter(out, case.metadata, case.windows) as writer:
        case.write(writer, 0, 2)
        case_2 = SampleSink(writer.partial, writer.layout)  # a window that is never recorded
        case_2.begin(2)
        case_2.add(1, torch.full((WINDOW, HIDDEN), 9.0), *samples(1, 2)[1:])
        case_2.close()
    assert not out.exists()
    with CalibrationWriter(out, case.metadata, case.windows) as writer:
        assert writer.done == 2
        case.write(writer, 2, COUNT)
        writer.finish()
    assert out.read_bytes() == finished.read_bytes()


KILLED = """
import sys, time
from pathlib import Path
from moet.calibrate import CalibrationWriter, Metadata, Windows
import numpy as np
metadata = Metadata.model_validate_json(Path(sys.argv[2]).read_text())
ids = np.arange(metadata.total, dtype=np.int32).reshape(metadata.windows, metadata.window)
with CalibrationWriter(Path(sys.argv[1]), metadata, Windows(ids)) as writer:
    writer.record(1)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_its_lock_and_its_journal(case: Case, tmp_path: Path) -> None:
    out, about = tmp_path / "c", tmp_path / "about.json"
    about.write_text(case.metadata.model_dump_json())
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(out), str(about)],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    with pytest.raises(CalibrationError, match="another process is writing it"):
        CalibrationWriter(out, case.metadata, case.windows).__enter__()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    for _ in range(50):
        try:
            with CalibrationWriter(out, case.metadata, case.windows) as writer:
                assert writer.done == 1
            return
        except CalibrationError:
            time.sleep(0.1)
    raise AssertionError("the lock outlived its process")


def test_a_finished_file_is_not_replaced_unasked(case: Case, finished: Path) -> None:
    with pytest.raises(CalibrationError, match="exists already"):
        CalibrationWriter(finished, case.metadata, case.windows).__enter__()


def test_an_unfinished_one_of_another_kind(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "c"
    with CalibrationWriter(out, case.metadata, case.windows) as writer:
        writer.record(3)
    other = case.metadata.model_copy(update={"top_k": 4})
    with pytest.raises(CalibrationError, match=r"another kind: top_k is 2, not 4"):
        CalibrationWriter(out, other, case.windows).__enter__()
    with CalibrationWriter(out, other, case.windows, overwrite=True) as writer:
        assert writer.done == 0


@pytest.mark.parametrize("what", ["newer", "text", "cut"])
def test_samples_that_cannot_be_resumed_are_not_lost_unasked(
    what: str, case: Case, tmp_path: Path
) -> None:
    out = tmp_path / "c"
    with CalibrationWriter(out, case.metadata, case.windows) as writer:
        case.write(writer, 0, 2)
        partial, journal = writer.partial, out.with_name("c.journal")
    reason = "it was made by another version of moet"
    if what == "newer":
        newer = journal.read_bytes().replace(b'"schema_version":1', b'"schema_version":2')
        assert newer != journal.read_bytes()
        journal.write_bytes(newer)
    elif what == "text":
        journal.write_bytes(b"no journal")
    else:
        os.truncate(partial, 4096)
        reason = "it has 4096 bytes, not"
    before = partial.read_bytes()
    with pytest.raises(CalibrationError, match=rf"{partial}.*{reason}.*Delete it, or allow"):
        CalibrationWriter(out, case.metadata, case.windows).__enter__()
    assert partial.read_bytes() == before
    with CalibrationWriter(out, case.metadata, case.windows, overwrite=True) as writer:
        assert writer.done == 0
        case.write(writer, 0, COUNT)
        writer.finish()
    Calibration.open(out)


def test_a_journal_without_samples_stops_nothing(case: Case, tmp_path: Path) -> None:
    (tmp_path / "c.journal").write_bytes(b"no journal")
    with CalibrationWriter(tmp_path / "c", case.metadata, case.windows) as writer:
        assert writer.done == 0


def test_another_model_is_refused(finished: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "other", hidden=HIDDEN, layers=3, vocab=512)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CalibrationError, match=r"is a calibration of 'm' .* not of 'other'"),
    ):
        Calibration.open(finished).check_model(checkpoint)


def test_damaged_samples_are_found(finished: Path, tmp_path: Path) -> None:
    raw = bytearray(finished.read_bytes())
    raw[-5] ^= 1  # of the last layer's weights
    (tmp_path / "c").write_bytes(raw)
    calibration = Calibration.open(tmp_path / "c")
    assert calibration.layer(1) is not None
    with pytest.raises(CalibrationError, match="the samples of layer 2 are damaged"):
        calibration.layer(2)


@pytest.mark.parametrize("what", ["cut", "longer", "header", "empty", "text", "missing"])
def test_what_is_no_calibration(what: str, finished: Path, tmp_path: Path) -> None:
    raw, path = finished.read_bytes(), tmp_path / "c"
    content = {
        "cut": raw[:-1],
        "longer": raw + b"x",
        "header": raw.replace(b'"I32"', b'"U32"', 1),
        "empty": b"",
        "text": b"no calibration at all",
    }
    if what != "missing":
        path.write_bytes(content[what])
    with pytest.raises(CalibrationError, match=str(path)):
        Calibration.open(path)


def test_inputs_that_are_not_finite_are_told(case: Case, tmp_path: Path) -> None:
    with CalibrationWriter(tmp_path / "c", case.metadata, case.windows) as writer:
        sink = SampleSink(writer.partial, writer.layout)
        sink.begin(0)
        x, ids, weights = samples(1, 0)
        x[3, 5] = float("nan")
        sink.add(1, x, ids, weights)
        sink.add(2, *samples(2, 0))
        assert sink.broken == [1]
        sink.begin(1)
        assert sink.broken == []
        sink.close()


def test_windows_are_evenly_spaced(tmp_path: Path) -> None:
    stream = np.arange(1000, dtype=np.int32)
    ids = cut_windows(stream, 300, 50, tmp_path).ids
    assert ids.shape == (6, 50)
    assert (np.diff(ids[:, 0]) == 166).all()
    assert cut_windows(stream, 10**9, 100, tmp_path).ids.shape == (10, 100)
    with pytest.raises(CalibrationError, match="has 1,000 tokens; a window takes 2,000"):
        cut_windows(stream, 10**9, 2000, tmp_path)


def test_token_files(tmp_path: Path) -> None:
    ids = np.array([0, 5, 99], np.uint16)
    ids.astype("<u2").tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", ids.astype(np.int64))
    for name in ("t.bin", "t.npy"):
        assert read_tokens(tmp_path / name, 100).tolist() == [0, 5, 99]
    with pytest.raises(CalibrationError, match=r"token 2 is 99.*vocabulary has 50"):
        read_tokens(tmp_path / "t.npy", 50)
    np.save(tmp_path / "f.npy", np.ones(3))
    with pytest.raises(CalibrationError, match="not a row of token ids"):
        read_tokens(tmp_path / "f.npy", 50)
    with pytest.raises(CalibrationError, match="cannot be read as tokens"):
        read_tokens(tmp_path / "none.bin", 50)


def test_text_files(tmp_path: Path) -> None:
    nano = Path(__file__).parents[2] / "models" / "nano-moe"
    (tmp_path / "t.txt").write_text("the quick brown fox " * 20)
    ids = read_text(tmp_path / "t.txt", nano)
    assert ids.dtype == np.int32
    assert 80 <= len(ids) <= 400
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="cannot be read as text"):
        read_text(tmp_path / "b.txt", nano)
