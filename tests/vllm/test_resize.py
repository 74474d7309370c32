"""Other sizes while the server runs: checked, in the right order, and by those who may."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from moet.errors import ConfigError
from moet.formats.layout import Precision
from moet.residency.tiers import TierSizes
from moet.vllm.endpoints import RESIZE_PATH, create
from moet.vllm.guard import guarded
from moet.vllm.resize import resize_rank

BASE, FP4 = Precision.BASE, Precision.NVFP4
ROW_BYTES = {BASE: 1 << 20, FP4: 2 << 20}


class Runtime:
    """A rank of two layers of 16 experts, half of them FP4; remembers what it was asked."""

    precision = {layer: [BASE] * 8 + [FP4] * 8 for layer in (3, 4)}  # noqa: RUF012
    recovery = {}  # noqa: RUF012

    def __init__(self, *tiers: str, refuses: Precision | None = None) -> None:
        self.tiers, self.refuses = tiers or ("gpu", "arena"), refuses
        self.sizes = {BASE: TierSizes(8, 12), FP4: TierSizes(8, 12)}
        self.asked: list[Precision] = []

    def stats(self) -> dict[str, Any]:
        return {
            "tiers": [
                {"precision": str(p), "tier": tier, "places": n, "row_bytes": ROW_BYTES[p]}
                for p, of in self.sizes.items()
                for tier, n in zip(self.tiers, (of.slots, of.places), strict=False)
            ]
        }

    def resize(self, precision: Precision, sizes: TierSizes) -> None:
        if precision == self.refuses:
            raise ConfigError("there is not enough GPU memory.", "Ask for less.")
        self.asked.append(precision)
        self.sizes[precision] = sizes


def test_what_is_not_named_stays() -> None:
    runtime = Runtime()
    answer = resize_rank(runtime, {"base_pool": "25%"}, 8)
    assert answer == {"base": {"slots": 4, "places": 12}, "nvfp4": {"slots": 8, "places": 12}}
    assert runtime.asked == [BASE]
    assert resize_rank(runtime, {}, 8) == answer
    assert runtime.asked == [BASE]


def test_what_shrinks_goes_first() -> None:
    runtime = Runtime()
    resize_rank(runtime, {"base_pool": "16", "fp4_pool": "0"}, 4)
    assert runtime.asked == [FP4, BASE]
    assert runtime.sizes == {BASE: TierSizes(16, 12), FP4: TierSizes(0, 12)}


def test_an_arena_in_bytes_is_for_all_rows_together() -> None:
    runtime = Runtime()
    resize_rank(runtime, {"arena": "30MiB"}, 8)
    sizes = runtime.sizes
    taken = sum(sizes[p].places * ROW_BYTES[p] for p in sizes)
    assert 28 << 20 <= taken <= 30 << 20
    assert all(of.places >= 2 for of in sizes.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_pool": "auto"}, 'base_pool "auto" is for the start of a server'),
        ({"arena": "1MiB"}, "arena 1MiB: an arena of"),
        ({"fp4_pool": "much"}, "fp4_pool 'much' is not a size"),
        ({"arena": "3"}, "Make the arena at least"),
        ({"base_pool": "8", "fp4_pool": "0", "arena": "9"}, "Make the arena at least 10 rows"),
    ],
)
def test_mistakes_change_nothing(values: dict[str, str], message: str) -> None:
    runtime = Runtime()
    runtime.sizes = {BASE: TierSizes(2, 12), FP4: TierSizes(2, 12)}
    assert message in resize_rank(runtime, values, 8)["error"]
    assert runtime.asked == []


def test_pools_of_a_cpu_keep_their_size() -> None:
    answer = resize_rank(Runtime("memory"), {"base_pool": "50%"}, 8)
    assert "the pools of a CPU keep the size" in answer["error"]


class Engine:
    def __init__(self, *runtimes: Runtime) -> None:
        self.runtimes = runtimes

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "moet_resize"
        return [resize_rank(runtime, args[0], 8) for runtime in self.runtimes]


def client(*runtimes: Runtime, host: str = "127.0.0.1") -> TestClient:
    app, plugin = FastAPI(), create()
    plugin.attach_router(app)
    app.state = SimpleNamespace(
        moet_engine=Engine(*runtimes), moet_guarded=guarded(Namespace(host=host))
    )
    return TestClient(app)


def test_every_rank_is_resized() -> None:
    answer = client(Runtime(), Runtime()).post(RESIZE_PATH, json={"base_pool": 10})
    assert answer.status_code == 200
    assert [rank["base"]["slots"] for rank in answer.json()["ranks"]] == [10, 10]


def test_refusals_over_http() -> None:
    ranks = Runtime(), Runtime(refuses=BASE)
    answer = client(*ranks).post(RESIZE_PATH, json={"base_pool": 10})
    assert answer.status_code == 400
    assert answer.json()["detail"] == "rank 1: there is not enough GPU memory. Ask for less."
    assert client(*ranks).post(RESIZE_PATH, json={"base_pol": 10}).status_code == 422
    answer = client(*ranks, host="0.0.0.0").post(RESIZE_PATH, json={"base_pool": 10})
    assert answer.status_code == 403
    assert "--api-key" in answer.json()["detail"]
