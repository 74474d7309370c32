"""Every tensor has one role; ranks share what vLLM shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError
from moet.plan.inventory import Inventory, Role, Split, role_of, split_of, take_inventory
from moet.plan.model_files import ModelFiles, TensorInfo, open_model
from tests.fixtures.checkpoints import FAMILIES, write_checkpoint

Opened = dict[str, tuple[ModelFiles, Inventory]]
NANO = Path(__file__).parents[2] / "models" / "nano-moe"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_adds_up(family: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", family=family, mtp=True)
    inventory = take_inventory(open_model(str(path)))
    with Checkpoint.open(path) as checkpoint:
        refs = checkpoint.tensors.values()
        assert inventory.tensors == len(refs)
        assert inventory.checkpoint_bytes == sum(ref.nbytes for ref in refs)
        assert inventory.geometry == checkpoint.geometry
        # Biases are of experts too, and so are input scales: more bytes than the matrices' own.
        target = [
            i for i in checkpoint.geometry.moe_layers if i not in inventory.geometry.mtp_layers
        ]
        experts = sum(
            checkpoint.expert_bytes(layer) * checkpoint.geometry.num_experts for layer in target
        )
        assert experts <= inventory.parts[Role.EXPERTS].total <= 1.05 * experts + 4096
    assert inventory.parts[Role.DENSE].total > 0
    assert inventory.parts[Role.EMBEDDING].total > 0


def test_nano_moe_adds_up() -> None:
    inventory = take_inventory(open_model(str(NANO)))
    with Checkpoint.open(NANO) as checkpoint:
        assert inventory.checkpoint_bytes == sum(r.nbytes for r in checkpoint.tensors.values())
        drafts = sum(
            ref.nbytes
            for name, ref in checkpoint.tensors.items()
            if f"layers.{checkpoint.geometry.num_layers}." in name
        )
    assert drafts == inventory.parts[Role.DRAFT].total + inventory.parts[Role.DRAFT_EXPERTS].total
    assert inventory.source_is_fp4


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.mlp.experts.7.gate_proj.weight", Role.EXPERTS),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", Role.DENSE),
        ("model.layers.3.mlp.gate.weight", Role.DENSE),
        ("model.layers.78.mlp.experts.7.up_proj.weight", Role.DRAFT_EXPERTS),
        ("model.layers.78.embed_tokens.weight", Role.DRAFT),
        ("model.layers.78.shared_head.head.weight", Role.DRAFT),
        ("model.embed_tokens.weight", Role.EMBEDDING),
        ("lm_head.weight", Role.HEAD),
        ("model.norm.weight", Role.DENSE),
        ("vision_tower.encoder.layers.90.mlp.weight", Role.VISION),
    ],
)
def test_roles(opened: Opened, name: str, role: Role) -> None:
    assert role_of(name, opened["GLM-5.2-NVFP4"][1].geometry) is role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layers.0.ffn.experts.9.w1.scale", Role.EXPERTS),
        ("mtp.2.ffn.experts.9.w1.weight", Role.DRAFT_EXPERTS),
        ("mtp.0.hc_head_fn", Role.DRAFT),
        ("hc_head_fn", Role.DENSE),
        ("embed.weight", Role.EMBEDDING),
        ("head.weight", Role.HEAD),
    ],
)
def test_roles_of_deepseek_v4(opened: Opened, name: str, role: Role) -> None:
    assert role_of(name, opened["DeepSeek-V4-Flash"][1].geometry) is role


@pytest.mark.parametrize(
    ("name", "shape", "split"),
    [
        ("model.layers.3.self_attn.q_b_proj.weight", (1024, 64), Split.SHARDED),
        ("model.layers.3.self_attn.q_a_proj.weight", (64, 1024), Split.REPLICATED),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (64, 1024), Split.REPLICATED),
        ("model.layers.3.self_attn.k_proj.weight", (64, 1024), Split.KV_HEADS),
        ("model.layers.3.mlp.gate.weight", (64, 1024), Split.REPLICATED),
        ("model.layers.3.mlp.gate_proj.weight", (64, 1024), Split.SHARDED),
        ("model.layers.3.self_attn.indexer.wq_b.weight", (64, 1024), Split.REPLICATED),
        ("layers.3.attn.wq_a.weight", (64, 1024), Split.REPLICATED),
        ("layers.3.attn.wq_b.weight", (64, 1024), Split.SHARDED),
        ("model.norm.weight", (1024,), Split.REPLICATED),
    ],
)
def test_splits(name: str, shape: tuple[int, ...], split: Split) -> None:
    assert split_of(TensorInfo(name, "BF16", shape, 2)) is split


def test_ranks_hold_their_share(opened: Opened) -> None:
    for _, inventory in opened.values():
        part = inventory.parts[Role.DENSE]
        whole = [inventory.rank_bytes(Role.DENSE, tp) for tp in (1, 2, 4, 8)]
        assert whole[0] == part.total
        assert whole == sorted(whole, reverse=True)
        assert whole[3] > part.nbytes[Split.REPLICATED]
        assert 2 * inventory.rank_bytes(Role.HEAD, 2) == inventory.parts[Role.HEAD].total


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", family="qwen3_moe")
    files = open_model(str(path))
    dense = ModelFiles(
        "m", None, files.config, files.modelopt, True,
        lambda: (t for t in files.tensors() if ".experts." not in t.name),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="is of a routed expert"):
        take_inventory(dense)
