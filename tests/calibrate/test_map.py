"""Static maps: experts ranked by the error of their base, within a budget, served by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moet.calibrate import Calibration, CalibrationWriter, SampleSink, Windows
from moet.calibrate.sensitivity import choose, measure, stream_power
from moet.checkpoints import Checkpoint
from moet.cli.calibrate import describe
from moet.cli.main import app
from moet.errors import ConfigError, MoetError
from moet.eval.pack import packed_experts
from moet.formats.layout import Precision
from moet.kernels import SwiGLU
from moet.pack import Pack, PackRowSource, write_pack
from moet.quantize import DataFreeQuantizer
from moet.vllm.precision import fp4_experts, named_map
from tests.fixtures.checkpoints import write_checkpoint

WINDOW, COUNT = 50, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = write_checkpoint(tmp_path_factory.mktemp("model") / "m", format="nvfp4")
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def pack(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    path = tmp_path_factory.mktemp("pack") / "m.moet"
    write_pack(checkpoint, path, quantizer=DataFreeQuantizer())
    return Pack.open(path)


@pytest.fixture(scope="module")
def calibration(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Random inputs; experts with a low number get most of the tokens, expert 7 none."""
    geometry, rng = checkpoint.geometry, torch.Generator().manual_seed(0)
    windows = Windows(np.zeros((COUNT, WINDOW), np.int32))
    out = tmp_path_factory.mktemp("calibration") / "c"
    metadata = describe(checkpoint, windows)
    with CalibrationWriter(out, metadata, windows) as writer:
        with SampleSink(writer.partial, writer.layout) as sink:
            for window in range(COUNT):
                sink.begin(window)
                for layer in metadata.layers:
                    likely = torch.tensor([8.0, 4, 2, 2, 1, 1, 1, 0]).expand(WINDOW, -1)
                    ids = torch.multinomial(likely, geometry.top_k, generator=rng).int()
                    x = torch.randn(WINDOW, geometry.hidden, generator=rng)
                    sink.add(layer, x, ids, torch.rand(ids.shape, generator=rng))
                    sink.power(layer, 100.0 * layer)
        return writer.finish()


def expected_error(
    checkpoint: Checkpoint, pack: Pack, calibration: Calibration, layer: int, expert: int
) -> float:
    samples = calibration.layer(layer)
    assert samples is not None
    with PackRowSource(pack, checkpoint) as source:
        base = packed_experts(source, Precision.BASE)(layer, expert)
    total = 0.0
    for t in range(samples.tokens):
        for k in range(samples.ids.shape[1]):
            if int(samples.ids[t, k]) != expert:
                continue
            x = samples.x[t].double()
            outputs = []
            for weights in (base, checkpoint.decode_expert(layer, expert)):
                gate, up, down = (w.double() for w in weights)
                inner = torch.nn.functional.silu(gate @ x) * (up @ x)
                outputs.append(down @ inner)
            g = float(samples.weights[t, k])
            total += float((g * (outputs[0] - outputs[1])).square().sum())
    return total / samples.tokens / (100.0 * layer)


def test_the_error_is_that_of_the_experts_outputs(
    checkpoint: Checkpoint, pack: Pack, calibration: Calibration
) -> None:
    with PackRowSource(pack, checkpoint) as source:
        found = measure(calibration, pack, source, SwiGLU(), lambda done, total: None)
    assert found.layers == (1, 2)
    for layer, expert in ((1, 0), (2, 0), (2, 5), (1, 7)):
        expected = expected_error(checkpoint, pack, calibration, layer, expert)
        assert found.error[found.layers.index(layer), expert] == pytest.approx(expected, rel=1e-4)
    assert found.error[0, 7] == 0
    ranked = found.ranked()
    errors = [found.error[found.layers.index(layer), expert] for layer, expert in ranked]
    assert errors == sorted(errors, reverse=True)
    chosen = choose(found, 3)
    assert sorted(ranked[:3]) == [(la, e) for la, experts in chosen.items() for e in experts]


def test_a_stream_that_was_not_seen(calibration: Calibration) -> None:
    """Its power is unknown; the layer's inputs stand in."""
    copy = calibration.path.with_name("unseen")
    raw = bytearray(calibration.path.read_bytes())
    at = calibration._layout.place(1, "stream_power")
    raw[at.offset : at.offset + at.nbytes] = np.full(COUNT, np.nan).tobytes()
    copy.write_bytes(raw)
    unseen = Calibration.open(copy)
    moment = unseen.array(1, "second_moment").astype(np.float64)
    assert stream_power(unseen, 1) == pytest.approx(np.trace(moment))
    assert stream_power(unseen, 2) == 200


def moet(*arguments: object) -> str:
    """A command, in this process; its errors are raised."""
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_map_is_made_and_served_by_name(
    checkpoint: Checkpoint, pack: Pack, calibration: Calibration
) -> None:
    command = ("map", checkpoint.path, "--calibration", calibration.path, "--pack", pack.path)
    said = moet(*command, "--budget", "25%", "-o", "quarter")
    assert "4 of 16 experts at FP4" in said.replace("\n", " ")
    content = json.loads(named_map(pack.path, "quarter").read_text())
    assert content["model"] == checkpoint.identity
    masks = fp4_experts("quarter", checkpoint.geometry, checkpoint.identity, pack.path)
    assert sum(int(masks[layer].sum()) for layer in (1, 2)) == 4
    assert masks[3].all()  # the draft layer
    row = pack.layers[1].layout.fp4.row_bytes
    moet(*command, "--budget", f"{(2 * row + 500) / 1000}KB", "-o", pack.path.parent / "two.json")
    two = str(pack.path.parent / "two.json")
    masks = fp4_experts(two, checkpoint.geometry, checkpoint.identity, pack.path)
    assert sum(int(masks[layer].sum()) for layer in (1, 2)) == 2
    with pytest.raises(ConfigError, match="exists already"):
        moet(*command, "-o", "quarter")
    moet(*command, "-o", "quarter", "--force")
    with pytest.raises(ConfigError, match="is no name for a map"):
        moet(*command, "-o", "base")
    with pytest.raises(ConfigError, match="'auto' is impossible"):
        moet(*command, "-o", "other", "--budget", "auto")


def test_a_calibration_of_another_model_makes_no_map(
    pack: Pack, calibration: Calibration, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", format="nvfp4", seed=1, vocab=512)
    with pytest.raises(MoetError, match="is a calibration of 'm'"):
        moet("map", other, "--calibration", calibration.path, "--pack", pack.path, "-o", "x")
