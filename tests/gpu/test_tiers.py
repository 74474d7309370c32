"""Tiers on a real GPU: what steps read while rows move, and what the device gives back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moet.errors import ConfigError, PackError
from moet.kernels.cuda.shape import PRECISION_CODES, REMOTE
from moet.pack.source import RowKey
from moet.residency.cuda import CudaTierDevice, memory
from moet.residency.tiers import Entry, Place, Tier, TieredResidency, TierOptions, TierSizes
from tests.gpu.tiers import GpuSteps
from tests.residency.cuda.history import run_block
from tests.residency.cuda.source import BASE, FIRST_LAYER, FP4, ROW_BYTES, RandomRows
from tests.residency.cuda.stalls import run_stall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LAYERS, EXPERTS = 2, 40


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_CHUNK_BYTES", 256 << 10)  # so that there are several
    logging.disable(logging.CRITICAL)  # failed steps are meant to fail
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def device() -> Iterator[CudaTierDevice]:
    """Experts in turns of both precisions."""
    code = (np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) % 2).astype(np.uint8)
    made = CudaTierDevice(code, ROW_BYTES, 2, torch.device("cuda"), decode_tokens=4)
    yield made
    made.close()


def ids(*experts: int) -> torch.Tensor:
    return torch.tensor([experts], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("block", range(10))
def test_two_hundred_histories(block: int) -> None:
    run_block(range(20 * block, 20 * (block + 1)), GpuSteps)


def test_a_step_is_not_kept_waiting_for_ever() -> None:
    run_stall(GpuSteps)


def test_snapshot_says_where_rows_are(device: CudaTierDevice) -> None:
    for tier in (Tier.GPU, Tier.ARENA):
        for precision, size in ROW_BYTES.items():
            device.resize(precision, tier, 20, size)
    places = {e: Place((BASE, FP4)[e % 2], Tier(e // 2 % 2), e) for e in (0, 1, 2, 3)}
    device.publish([Entry(place.precision, 1, e, place) for e, place in places.items()])
    rows = device.ensure(1, ids(3, 0, 2, 1, -1, EXPERTS))
    device.finish()
    torch.cuda.synchronize()
    address, precision = rows.address.tolist(), rows.precision.tolist()
    for e, place in places.items():
        assert address[e] == device._address(place)
        assert precision[e] == e % 2 + REMOTE * (place.tier == Tier.ARENA)
    assert not any(address[4:])
    pointer = device._arena[BASE].view(2)
    assert address[2] == pointer.ctypes.data
    counts = device.counts()
    assert counts.steps == counts.steps_local == 0  # it did not begin with the first layer
    assert device.begun() == device.done() == 1


def test_a_draft_pass_is_a_step_for_reuse_only(device: CudaTierDevice) -> None:
    device.resize(BASE, Tier.GPU, 1, ROW_BYTES[BASE])
    device.publish([Entry(BASE, layer, 0, Place(BASE, Tier.GPU, 0)) for layer in (0, 1)])
    for layer in (0, 1):
        device.ensure(layer, ids(0))
    device.finish()
    device.ensure(1, ids(0))
    device.finish()
    torch.cuda.synchronize()
    assert device.begun() == device.done() == 2
    counts = device.counts()
    assert counts.steps == counts.steps_local == 1
    assert counts.use[BASE][:, 0].tolist() == [1, 2]


def test_missing_rows_are_posted_and_waited_for(device: CudaTierDevice) -> None:
    device.resize(BASE, Tier.ARENA, 4, ROW_BYTES[BASE])
    device.publish([Entry(BASE, 0, 2, Place(BASE, Tier.ARENA, 0))])
    rows = device.ensure(0, ids(2, 38, 5, 0))
    device.wait(5.0, 0)
    request = device.poll()
    assert request is not None
    assert (request.number, request.layer) == (1, 0)
    assert request.missing == {BASE: [0, 38], FP4: [5]}
    assert request.present == {BASE: [2], FP4: []}
    assert device.poll() is request
    time.sleep(0.01)
    assert not torch.cuda.current_stream().query(), "the step did not wait"
    device.publish([Entry(BASE, 0, e, Place(BASE, Tier.ARENA, 1)) for e in (0, 38)])
    device.answer(1, False)
    device.ensure(1, ids(7))  # of a step that has failed: waits for nothing
    device.finish()
    torch.cuda.synchronize()
    assert device.poll() is None
    assert device.failed_steps() == device.failed_step() == 1
    assert rows.address[0] == rows.address[38] != 0
    assert not torch.equal(rows.address[5], rows.address[0])
    device.ensure(0, ids(2))
    device.finish()
    torch.cuda.synchronize()
    assert device.failed_steps() == 1


@contextmanager
def served(sizes: TierSizes) -> Iterator[tuple[RandomRows, CudaTierDevice, GpuSteps, Any]]:
    """A layer of eight experts, with its manager."""
    source = RandomRows(1, 8, [BASE], seed=1)
    code = np.full((1, 8), PRECISION_CODES[BASE], np.uint8)
    made = CudaTierDevice(code, {BASE: ROW_BYTES[BASE]}, 2, torch.device("cuda"), decode_tokens=4)
    options = TierOptions(layer_rows=2, plan_every=1)
    with TieredResidency(
        source, source.layers, {BASE: code == 0}, {BASE: sizes}, made, options
    ) as manager:
        manager.start()
        yield source, made, GpuSteps(made, source, code), manager


def run(made: CudaTierDevice, steps: GpuSteps, *experts: int) -> None:
    chosen = ids(*experts)
    steps.check(0, made.ensure(0, chosen), chosen)
    made.finish()


def test_a_row_that_cannot_be_read_fails_its_step_only() -> None:
    with served(TierSizes(2, 4)) as (source, made, steps, manager):
        source.broken = {RowKey(FIRST_LAYER, 3, BASE)}
        for experts in ((0, 1), (2, 3), (0, 4)):
            run(made, steps, *experts)
        torch.cuda.synchronize()
        assert made.failed_steps() == int(made.failed_on_device()) == 1
        assert made.failed_step() == 2
        assert isinstance(manager.failure(2), PackError)
        assert steps.wrong == 0
        assert steps.zeros > 0


def test_a_step_is_served_while_the_driver_waits_for_it() -> None:
    """To load a kernel at its first use, or to free memory, the driver waits until all kernels have
    ended: the calling thread waits for the step, and the step for its rows."""
    unused = iter((torch.special.bessel_j1, torch.special.bessel_y1, torch.special.airy_ai))
    x = torch.ones(4, device="cuda")
    with served(TierSizes(2, 4)) as (source, made, steps, _):
        source.delay = 0.02
        for round_ in range(6):
            for expert in range(8):
                run(made, steps, expert, (expert + 1 + round_) % 8)
                if expert % 3 == 0 and (load := next(unused, None)):
                    load(x)
                if expert % 3 == 1:
                    spare = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
                    del spare
                    torch.cuda.empty_cache()
        torch.cuda.synchronize()
        assert steps.wrong == steps.zeros == 0


def test_capture_beside_copies(device: CudaTierDevice) -> None:
    """Another thread's copies do not break a capture in the global mode."""
    for tier in (Tier.GPU, Tier.ARENA):
        device.resize(BASE, tier, 2, ROW_BYTES[BASE])
    errors: list[BaseException] = []
    stop = threading.Event()

    def copy() -> None:
        try:
            while not stop.is_set():
                one = device.start_copy(Place(BASE, Tier.ARENA, 0), Place(BASE, Tier.GPU, 0))
                while not one.done():
                    time.sleep(1e-5)
        except BaseException as error:
            errors.append(error)

    device.publish([Entry(BASE, 0, 0, Place(BASE, Tier.GPU, 1))])
    thread = threading.Thread(target=copy)
    thread.start()
    chosen = ids(0)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            device.ensure(0, chosen)
            device.finish()
        graph.replay()
    torch.cuda.synchronize()
    stop.set()
    thread.join()
    assert not errors
    assert device.done() == 20


def test_more_than_the_gpu_has_is_refused(device: CudaTierDevice) -> None:
    device.resize(BASE, Tier.GPU, 3, ROW_BYTES[BASE])
    address = device._address(Place(BASE, Tier.GPU, 2))
    before = torch.cuda.memory_reserved()
    with pytest.raises(ConfigError, match="GPU memory"):
        device.resize(BASE, Tier.GPU, (1 << 40) // ROW_BYTES[BASE], ROW_BYTES[BASE])
    assert torch.cuda.memory_reserved() == before
    device.resize(BASE, Tier.GPU, 4, ROW_BYTES[BASE])
    assert device._address(Place(BASE, Tier.GPU, 2)) == address


def test_all_memory_comes_back() -> None:
    code = np.zeros((LAYERS, EXPERTS), np.uint8)

    def use() -> None:
        made = CudaTierDevice(
            code, {BASE: ROW_BYTES[BASE]}, 2, torch.device("cuda"), decode_tokens=4
        )
        for tier in (Tier.GPU, Tier.ARENA):
            made.resize(BASE, tier, 2000, ROW_BYTES[BASE])
        made.resize(BASE, Tier.ARENA, 1000, ROW_BYTES[BASE])
        copy = made.start_copy(Place(BASE, Tier.ARENA, 999), Place(BASE, Tier.GPU, 1999))
        while not copy.done():
            time.sleep(1e-5)
        made.close()
        made.close()
        torch.cuda.empty_cache()

    def taken() -> tuple[int, int]:
        """Bytes of GPU and of host memory that this process holds; others may use the GPU, too."""
        lines = Path("/proc/self/status").read_text().splitlines()
        resident = next(line for line in lines if line.startswith("VmRSS"))
        return torch.cuda.memory_reserved(), int(resident.split()[1]) << 10

    use()
    before = taken()
    for _ in range(10):
        use()
    gpu, host = (now - then for now, then in zip(taken(), before, strict=True))
    assert gpu == 0
    assert host < 2000 * ROW_BYTES[BASE]  # ten times that, if arenas stayed
