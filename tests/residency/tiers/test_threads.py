"""The manager with its own thread, real reading threads and a real pack."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import ConfigError, PackError, ResidencyError
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource, RowKey, write_pack
from moet.quantize import QUANTIZERS
from moet.residency.tiers import Tier, TieredResidency, TierOptions, TierSizes
from tests.fixtures.checkpoints import write_checkpoint

from .threads import Row, StepError, ThreadDevice

BASE, FP4 = Precision.BASE, Precision.MXFP4
EXPERTS = 8
SIZES = {BASE: TierSizes(4, 6), FP4: TierSizes(3, 7)}
OPTIONS = TierOptions(plan_every=2, max_moves=3, layer_rows=4)


@pytest.fixture(scope="module")
def pack_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of base and FP4 rows: 2 layers of 8 experts."""
    directory = tmp_path_factory.mktemp("pack")
    model = write_checkpoint(
        directory / "model", family="qwen3_moe", format="bf16", experts=EXPERTS, layers=2, vocab=64
    )
    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, directory / "pack", quantizer=QUANTIZERS["data-free"](), workers=1)
    return directory / "pack"


class Served:
    """A manager that runs, over a pack. expected: all rows, read beforehand."""

    def __init__(self, source: PackRowSource, options: TierOptions, heat: Path | None) -> None:
        shape = (len(source.layers), EXPERTS)
        expected: dict[Row, bytes] = {}
        for precision in SIZES:
            out = np.empty(source.layouts[precision].row_bytes, np.uint8)
            for index, layer in enumerate(source.layers):
                for expert in range(EXPERTS):
                    source.read(RowKey(layer, expert, precision), out)
                    expected[precision, index, expert] = out.tobytes()
        self.device = ThreadDevice(shape, expected, seed=1)
        self.manager = TieredResidency(
            source,
            source.layers,
            {precision: np.ones(shape, np.bool_) for precision in SIZES},
            SIZES,
            self.device,
            options,
            heat_path=heat,
        )
        self.manager.start()

    def steps(self, rng: Random, count: int, precisions: Sequence[Precision] = (BASE, FP4)) -> None:
        """Steps that use experts of low number more often, at each of these precisions."""
        for _ in range(count):
            self.device.step(
                [
                    (
                        layer,
                        [
                            (precision, expert)
                            for precision in precisions
                            for expert in {int(EXPERTS * rng.random() ** 2) for _ in range(3)}
                        ],
                    )
                    for layer in range(2)
                ]
            )


@contextmanager
def serve(
    pack_path: Path, options: TierOptions = OPTIONS, heat: Path | None = None
) -> Iterator[Served]:
    with PackRowSource(Pack.open(pack_path)) as source:
        served = Served(source, options, heat)
        with served.manager:
            yield served


@pytest.mark.parametrize("policy", ["lfu", "lru", "static"])
def test_rows_of_a_pack_are_right_at_any_time(pack_path: Path, policy: str) -> None:
    rng = Random(policy)
    options = TierOptions(policy=policy, plan_every=2, max_moves=3, layer_rows=4)
    with serve(pack_path, options) as served:
        manager = served.manager
        served.steps(rng, 40)
        grown = manager.resize(BASE, TierSizes(8, 8))
        served.steps(rng, 20)
        grown.result(timeout=10)
        shrunk = manager.resize(BASE, TierSizes(2, 5))
        served.steps(rng, 20)
        shrunk.result(timeout=10)
        served.steps(rng, 20)
        now = manager.metrics()
        assert now.steps == 100
        assert now.failed_requests == now.read_errors == 0
        assert now.disk_reads == sum(now.disk_latency.counts) > 0
        assert now.promotions > 0
        assert now.tiers[BASE, Tier.GPU].places == 2
        assert sum(now.hits.values()) > 100
        assert now.stall_seconds > 0


def test_rows_stay_in_memory_where_there_is_room_for_all(pack_path: Path) -> None:
    with serve(pack_path) as served:
        manager = served.manager
        manager.resize(BASE, TierSizes(16, 6)).result(timeout=10)
        manager.preload()
        before = manager.metrics()
        for slots, places in ((6, 14), (2, 18), (9, 11)):
            manager.resize(BASE, TierSizes(slots, places)).result(timeout=10)
            served.steps(Random(slots), 20, [BASE])  # some change places
        after = manager.metrics()
        assert after.demotions >= before.demotions + 14
        assert (after.evictions, after.disk_reads) == (before.evictions, before.disk_reads)


def test_rows_are_fetched_before_a_step_asks_for_them(pack_path: Path) -> None:
    with serve(pack_path) as served:
        failed: set[int] = set()
        served.manager.fetch(FP4, [1, EXPERTS + 5], failed).result(timeout=10)
        wanted, table = {(FP4, 0, 1), (FP4, 1, 5)}, served.device.table
        end = time.monotonic() + 10
        while time.monotonic() < end and set(table) != wanted:
            time.sleep(1e-3)
        assert set(table) == wanted
        served.device.step([(0, [(FP4, 1)]), (1, [(FP4, 5)])])
        now = served.manager.metrics()
        assert now.requests == 0
        assert not failed


def test_nothing_starts_while_the_device_is_to_be_quiet(pack_path: Path) -> None:
    with serve(pack_path) as served:
        manager = served.manager
        served.steps(Random(2), 10)
        with manager.quiet(), manager.quiet():
            before = dict(served.device.table)
            loads = manager.begin_preload()
            grown = manager.resize(BASE, TierSizes(8, 8))
            time.sleep(0.05)
            assert served.device.table == before
            assert not any(future.done() for future in [*loads, grown])
        for future in [*loads, grown]:
            future.result(timeout=10)
        assert served.device.table != before
        served.steps(Random(3), 10)


def test_preload_fills_the_tiers_and_heat_outlives_a_restart(
    pack_path: Path, tmp_path: Path
) -> None:
    heat = tmp_path / "heat.safetensors"
    hot = [(layer, [(BASE, 6), (BASE, 7)]) for layer in range(2)]
    with serve(pack_path, heat=heat) as served:
        progress: list[tuple[int, int]] = []
        served.manager.preload(lambda done, total: progress.append((done, total)))
        rows = (4 + 3) + (3 + 4)  # three places of each arena are for rows that pass through
        assert progress[-1] == (rows, rows)
        tiers = served.manager.metrics().tiers
        assert tiers[BASE, Tier.GPU].free == tiers[FP4, Tier.GPU].free == 0
        assert tiers[BASE, Tier.ARENA].free >= 1
        for _ in range(80):
            served.device.step(hot)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "heat.base.safetensors"
    ]  # nothing was learnt about FP4 rows
    with serve(pack_path, heat=heat) as served:
        served.manager.preload()
        table = served.device.table
        for layer, used in hot:
            for precision, expert in used:
                assert table[precision, layer, expert].tier == Tier.GPU
        served.device.step(hot)
        now = served.manager.metrics()
        assert (now.steps, now.steps_local) == (1, 1)


def test_a_row_damaged_while_serving_fails_its_steps_only(pack_path: Path) -> None:
    with PackRowSource(Pack.open(pack_path)) as source:
        layout = Pack.open(pack_path).layers[source.layers[1]]
    offset = layout.layout.row_offset(BASE, 5)
    with serve(pack_path) as served:
        good = layout.path.read_bytes()
        try:
            with open(layout.path, "r+b") as file:
                file.seek(offset)
                file.write(bytes([good[offset] ^ 1]))
            for _ in range(2):
                with pytest.raises(StepError) as failed:
                    served.device.step([(0, [(BASE, 1)]), (1, [(BASE, 4), (BASE, 5)])])
                error = served.manager.failure(failed.value.number)
                assert isinstance(error, PackError)
                assert f"layer {source.layers[1]} expert 5" in str(error)
                served.device.step([(0, [(BASE, 1)]), (1, [(BASE, 4), (BASE, 6)])])
        finally:
            layout.path.write_bytes(good)
        served.device.step([(1, [(BASE, 5)])])
        now = served.manager.metrics()
        assert (now.read_errors, now.failed_requests) == (2, 2)


def test_an_arena_too_small_for_a_step(pack_path: Path) -> None:
    options = TierOptions(layer_rows=1)  # not true of the steps to come
    with serve(pack_path, options) as served:
        served.manager.resize(BASE, TierSizes(2, 3)).result(timeout=10)
        with pytest.raises(StepError) as failed:
            served.device.step([(0, [(BASE, expert) for expert in range(6)])])
        error = served.manager.failure(failed.value.number)
        assert isinstance(error, ResidencyError)
        assert "Make the arena at least 6 rows" in str(error)
        served.device.step([(0, [(BASE, expert) for expert in range(4)])])


def test_sizes_that_cannot_work_are_refused(pack_path: Path) -> None:
    with serve(pack_path) as served:
        with pytest.raises(ConfigError, match=r"Make the arena at least 5 rows .*GiB"):
            served.manager.resize(BASE, TierSizes(1, 4)).result(timeout=10)
        assert served.manager.metrics().tiers[BASE, Tier.ARENA].places == 6
        served.steps(Random(1), 5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({BASE: TierSizes(1, 4)}, "Make the arena at least 5 rows"), ({}, "or no sizes for them")],
)
def test_a_start_that_is_refused_leaves_no_device_open(
    pack_path: Path, sizes: dict[Precision, TierSizes], message: str
) -> None:
    with PackRowSource(Pack.open(pack_path)) as source:
        owned = np.ones((len(source.layers), EXPERTS), np.bool_)
        device = ThreadDevice(owned.shape, {(BASE, 0, 0): b""}, seed=1)
        with pytest.raises(ConfigError, match=message):
            TieredResidency(source, source.layers, {BASE: owned}, sizes, device, OPTIONS)
        with pytest.raises(RuntimeError, match="shutdown"):
            device._engine.submit(lambda: None)


def test_a_failed_copy_ends_serving_with_its_reason(pack_path: Path) -> None:
    with serve(pack_path) as served:
        served.device.broken_copies = True
        with pytest.raises(ResidencyError, match=r"stopped.*copy engine"):
            served.manager.preload()
        with pytest.raises(StepError) as failed:
            served.device.step([(0, [(BASE, expert) for expert in range(8)])])
        assert "copy engine" in str(served.manager.failure(failed.value.number))
        with pytest.raises(ResidencyError, match=r"stopped.*copy engine"):
            served.manager.resize(BASE, TierSizes(8, 8)).result(timeout=10)
        served.device.broken_copies = False


def test_after_close_nothing_is_promised(pack_path: Path) -> None:
    with serve(pack_path) as served:
        pass
    with pytest.raises(ResidencyError, match="closed"):
        served.manager.resize(BASE, TierSizes(8, 8))
    with pytest.raises(ResidencyError, match="closed"), served.manager.quiet():
        pass
    served.manager.close()
