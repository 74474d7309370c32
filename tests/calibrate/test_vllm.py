"""Calibration through the real engine: what is recorded is what transformers computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import LLM

from moet.calibrate import (
    Calibration,
    CalibrationLayout,
    CalibrationWriter,
    SampleSink,
    Windows,
)
from moet.checkpoints import Checkpoint
from moet.cli.calibrate import describe
from moet.errors import ConfigError
from moet.eval.pack import packed_experts
from moet.eval.reference import Experts, load_reference
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource, write_pack
from moet.quantize import (
    DataFreeQuantizer,
    GptqQuantizer,
    LayerSamples,
    SampleSource,
    SequentialQuantizer,
)
from moet.vllm.collect import calibration_engine, collect
from moet.vllm.sequential import SequentialSamples
from tests.fixtures.checkpoints import write_checkpoint

pytestmark = pytest.mark.server
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
WINDOW, COUNT = 40, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen"
    return write_checkpoint(path, "qwen3_moe", "nvfp4", layers=3)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(model) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def pack(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack") / "level-0"
    write_pack(checkpoint, path, quantizer=DataFreeQuantizer())
    return path


@pytest.fixture(scope="module")
def windows() -> Windows:
    rng = np.random.default_rng(5)
    return Windows(rng.integers(3, 256, (COUNT, WINDOW), dtype=np.int32))


@pytest.fixture(scope="module")
def llm(model: Path, pack: Path) -> Iterator[LLM]:
    settings = {"pack": str(pack), "precision": "fp4", "fp4_pool": "40%", "streaming_slots": 2}
    with calibration_engine(model, settings | {"base_pool": "60%"}, WINDOW, ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def calibrations(
    llm: LLM, checkpoint: Checkpoint, windows: Windows, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Calibration, Calibration]:
    """An undisturbed one, and one of a run that stopped after two windows and went on."""
    directory = tmp_path_factory.mktemp("calibration")
    metadata = describe(checkpoint, windows)

    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with CalibrationWriter(directory / "whole", metadata, windows) as writer:
        collect(llm, writer, windows, lambda done: None)
        whole = writer.finish()
    with (
        pytest.raises(KeyboardInterrupt),
        CalibrationWriter(directory / "resumed", metadata, windows) as writer,
    ):
        collect(llm, writer, windows, stop)
    with CalibrationWriter(directory / "resumed", metadata, windows) as writer:
        assert writer.done == 2
        collect(llm, writer, windows, lambda done: None)
        resumed = writer.finish()
    return whole, resumed


def reference_inputs(
    checkpoint: Checkpoint, experts: Experts, windows: Windows
) -> dict[int, tuple[torch.Tensor, ...]]:
    """Layer → what reaches its experts in transformers: x, ids, weights, of all windows."""
    model = load_reference(checkpoint, experts)
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    for layer in checkpoint.geometry.moe_layers:

        def note(module: object, given: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            seen.setdefault(layer, []).append(tuple(part.flatten(0, -2) for part in given[:3]))

        model.get_submodule(f"model.layers.{layer}.mlp.experts").register_forward_pre_hook(note)
    for row in windows.ids:
        model(torch.from_numpy(row.astype(np.int64))[None])
    return {
        layer: tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
        for layer, rows in seen.items()
    }


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within what bfloat16 keeps, and float32 sums in another order."""
    return bool(((ours.float() - theirs).abs() <= 0.01 * theirs.abs() + 1e-3).all())


def test_samples_are_what_transformers_computes(
    calibrations: tuple[Calibration, Calibration], checkpoint: Checkpoint, windows: Windows
) -> None:
    expected = reference_inputs(checkpoint, checkpoint.decode_expert, windows)
    calibration = calibrations[0]
    calibration.check_model(checkpoint)
    assert calibration.metadata.layers == checkpoint.geometry.moe_layers
    for layer, (x, ids, weights) in expected.items():
        found = calibration.layer(layer)
        assert found is not None
        assert near(found.x, x)
        order, theirs = found.ids.argsort(1), ids.argsort(1)
        assert torch.equal(found.ids.gather(1, order).long(), ids.gather(1, theirs))
        assert near(found.weights.gather(1, order), weights.gather(1, theirs))
        assert np.isfinite(calibration.array(layer, "stream_power")).all()


def test_the_stream_grows_by_what_the_layers_add(
    calibrations: tuple[Calibration, Calibration], checkpoint: Checkpoint, windows: Windows
) -> None:
    model = load_reference(checkpoint, checkpoint.decode_expert)
    with torch.no_grad():
        states = [
            model(torch.from_numpy(row.astype(np.int64))[None], output_hidden_states=True)
            for row in windows.ids
        ]
    for layer in checkpoint.geometry.moe_layers:
        powers = [s.hidden_states[layer].square().sum(-1).mean().item() for s in states]
        found = calibrations[0].array(layer, "stream_power")
        assert np.allclose(found, powers, rtol=1e-3)


def test_a_run_that_stopped_goes_on_to_the_same_bytes(
    calibrations: tuple[Calibration, Calibration],
) -> None:
    whole, resumed = calibrations
    assert whole.path.read_bytes() == resumed.path.read_bytes()


def test_a_pack_names_its_calibration(
    calibrations: tuple[Calibration, Calibration], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_pack(checkpoint, tmp_path / "p", quantizer=GptqQuantizer(calibrations[0]))
    quantizer = Pack.open(tmp_path / "p").manifest.quantizer
    assert (quantizer.name, quantizer.level) == ("gptq", 2)
    assert quantizer.calibration == calibrations[0].digest


class Kept(SampleSource):
    """Keeps a copy of the quantized model's inputs that pass."""

    def __init__(self, inner: SampleSource) -> None:
        self.inner, self.digest = inner, inner.digest
        self.quantized: dict[int, torch.Tensor] = {}

    def layer(self, layer: int) -> LayerSamples | None:
        found = self.inner.layer(layer)
        if found is not None and found.quantized is not None:
            self.quantized[layer] = found.quantized.clone()
        return found


def test_level_3_sees_what_the_pack_computes(
    calibrations: tuple[Calibration, Calibration],
    llm: LLM,
    checkpoint: Checkpoint,
    windows: Windows,
    tmp_path: Path,
) -> None:
    out = tmp_path / "p"
    passes: list[int] = []
    with SequentialSamples(
        calibrations[0],
        Path(f"{out}.partial"),
        lambda: nullcontext(llm),
        lambda layer, done: passes.append(layer),
    ) as samples:
        kept = Kept(samples)
        write_pack(checkpoint, out, quantizer=SequentialQuantizer(kept), workers=2)
    _, *later = checkpoint.geometry.moe_layers
    assert sorted(kept.quantized) == later
    assert passes == [layer for layer in later for _ in range(COUNT)]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    with PackRowSource(Pack.open(out), checkpoint) as source:
        expected = reference_inputs(checkpoint, packed_experts(source, Precision.BASE), windows)
    for layer in later:
        assert near(kept.quantized[layer], expected[layer][0])
        fp4 = calibrations[0].layer(layer)
        assert fp4 is not None
        assert not near(fp4.x, expected[layer][0])


class StoppedError(Exception):
    pass


def test_level_3_goes_on_where_it_stopped(
    calibrations: tuple[Calibration, Calibration], llm: LLM, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    last = checkpoint.geometry.moe_layers[-1]

    def make(out: Path, progress: Callable[[int, int], None]) -> None:
        partial = Path(f"{out}.partial")
        with SequentialSamples(
            calibrations[0], partial, lambda: nullcontext(llm), progress
        ) as samples:
            write_pack(checkpoint, out, quantizer=SequentialQuantizer(samples), workers=2)

    def stop(layer: int, done: int) -> None:
        if (layer, done) == (last, 2):
            raise StoppedError

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    make(whole, lambda layer, done: None)
    with pytest.raises(StoppedError):
        make(resumed, stop)
    assert not resumed.exists()
    passes: list[int] = []
    make(resumed, lambda layer, done: passes.append(layer))
    assert passes == [last] * COUNT  # the layers before are not computed again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]
    for path in whole.iterdir():
        assert path.read_bytes() == (resumed / path.name).read_bytes(), path.name


def test_engine_options_that_are_calibrations_own(model: Path, pack: Path) -> None:
    with (
        pytest.raises(ConfigError, match="'max_num_seqs' is the command's own"),
        calibration_engine(model, {"pack": str(pack)}, WINDOW, {"max_num_seqs": 4}),
    ):
        pass


def test_a_layer_that_saw_other_tokens_as_well_is_noticed(
    calibrations: tuple[Calibration, Calibration],
) -> None:
    """The sink counts them, and keeps them out of the next window's place."""
    layout = CalibrationLayout(calibrations[0].metadata)
    copy = calibrations[0].path.with_name("copy")
    copy.write_bytes(calibrations[0].path.read_bytes())
    with SampleSink(copy, layout) as sink:
        sink.begin(0)
        layer = layout.metadata.layers[0]
        found = calibrations[0].layer(layer)
        assert found is not None
        sink.add(layer, found.x, found.ids, found.weights)
        assert sink.seen[layer] == COUNT * WINDOW
    assert copy.read_bytes() == calibrations[0].path.read_bytes()
