"""A model on the hub is planned from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moet.errors import CheckpointError
from moet.plan.inventory import Inventory, take_inventory
from moet.plan.model_files import ModelFiles, open_model
from tests.fixtures.checkpoints import write_checkpoint
from tests.plan.headline import deepseek_v4_flash
from tests.plan.hub import Hub, serve_hub

Opened = dict[str, tuple[ModelFiles, Inventory]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    with serve_hub(tmp_path / "hub") as server:
        yield server


def test_headers_come_by_range_requests(hub: Hub, opened: Opened) -> None:
    deepseek_v4_flash(hub.root / "deepseek-ai" / "DeepSeek-V4-Flash")
    files = open_model("deepseek-ai/DeepSeek-V4-Flash", endpoint=hub.url)
    remote, local = take_inventory(files), opened["DeepSeek-V4-Flash"][1]
    assert remote == local
    assert (files.name, files.local) == ("deepseek-ai/DeepSeek-V4-Flash", False)
    headers = 72_317 * 200
    assert hub.sent < 2 * headers  # of 167 GB


@pytest.mark.parametrize("shards", [1, 2])
def test_one_file_or_several(hub: Hub, shards: int) -> None:
    path = write_checkpoint(hub.root / "owner" / "model", format="nvfp4", shards=shards)
    remote = take_inventory(open_model("owner/model", revision="main", endpoint=hub.url))
    assert remote == take_inventory(open_model(str(path)))


def test_nothing_is_left_in_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    write_checkpoint(hub.root / "owner" / "model")
    take_inventory(open_model("owner/model", endpoint=hub.url))
    assert not (tmp_path / "cache").exists()


def test_what_the_hub_refuses_is_said(hub: Hub, tmp_path: Path) -> None:
    (hub.root / "owner").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"the hub has no model owner/none.*by its directory"):
        open_model("owner/none", endpoint=hub.url)
    (hub.root / "owner" / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"owner/empty has no config\.json"):
        open_model("owner/empty", endpoint=hub.url)
    path = write_checkpoint(hub.root / "owner" / "model")
    shard = path / "model-00001-of-00002.safetensors"
    for header in (b"no header at all", (4).to_bytes(8, "little") + b"[17]"):
        shard.write_bytes(header)
        with pytest.raises(CheckpointError, match=r"owner/model: model-00001.*incomplete"):
            take_inventory(open_model("owner/model", endpoint=hub.url))
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors is not on the hub"):
        take_inventory(open_model("owner/model", endpoint=hub.url))
    (path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"owner/model: config\.json is damaged"):
        open_model("owner/model", endpoint=hub.url)
    hub.gated = True
    with pytest.raises(CheckpointError, match="is gated on the hub"):
        open_model("owner/model", endpoint=hub.url)


def test_names_that_are_none_are_refused_without_asking(hub: Hub) -> None:
    for name in ("./not/there", "a/b/c/d", "what is this?"):
        with pytest.raises(CheckpointError, match="directory"):
            open_model(name, endpoint=hub.url)
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        open_model("owner/model", endpoint=hub.url)
