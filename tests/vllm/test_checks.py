"""What is refused, and how: each message says what to change."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError, ConfigError, PackError, UnsupportedError
from moet.kernels import SwiGLU
from moet.kernels.reference import ReferenceExperts
from moet.settings import Settings
from moet.vllm import checks, model
from moet.vllm.checks import check_engine, check_model
from moet.vllm.layer import (
    Biases,
    activation_of,
    check_computation,
    check_layer,
    layer_index,
)
from moet.vllm.method import _refuse
from moet.vllm.plugin import register
from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.serving import make_pack


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


def config(path, **changes):
    """vLLM's configuration, as far as the checks look at it; changes by dotted name."""
    found = SimpleNamespace(
        additional_config={},
        lora_config=None,
        model_config=SimpleNamespace(
            hf_config=AutoConfig.from_pretrained(path), model=str(path), use_mla=False
        ),
        parallel_config=SimpleNamespace(
            enable_expert_parallel=False,
            enable_eplb=False,
            data_parallel_size=1,
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        compilation_config=SimpleNamespace(custom_ops=["all"]),
    )
    for name, value in changes.items():
        *parents, last = name.split("__")
        target = found
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return found


def test_vllm_is_stopped_in_process_0(path, monkeypatch, tmp_path):
    """By the real config classes: nothing of vLLM has been started when these are raised."""
    register()
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with pytest.raises(PackError, match="there is no pack of"):
        EngineArgs(model=str(path), quantization="moet").create_engine_config()
    settings = {"moet": {"base_pol": "1%"}}
    with pytest.raises(ConfigError, match="Did you mean 'base_pool'"):
        EngineArgs(
            model=str(path), quantization="moet", additional_config=settings
        ).create_engine_config()
    with pytest.raises(UnsupportedError, match="--load-format tensorizer"):
        EngineArgs(
            model=str(path), quantization="moet", load_format="tensorizer"
        ).create_engine_config()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"parallel_config__enable_expert_parallel": True}, UnsupportedError, "without --enable-e"),
        ({"parallel_config__enable_eplb": True}, UnsupportedError, "without --enable-eplb"),
        ({"parallel_config__data_parallel_size": 2}, UnsupportedError, "one server for each"),
        ({"parallel_config__prefill_context_parallel_size": 2}, UnsupportedError, "context paral"),
        ({"lora_config": object()}, UnsupportedError, "without --enable-lora"),
        ({"load_config__load_format": "tensorizer"}, UnsupportedError, "tensorizer is not"),
        ({"load_config__load_format": "tensorizer"}, UnsupportedError, "auto, hf, safetensors"),
        ({"additional_config": {"moet": {"pol": 1}}}, ConfigError, "unknown setting 'pol'"),
        ({"additional_config": {"moet": {"operator": "cuda"}}}, ConfigError, "without a GPU"),
    ],
)
def test_what_is_not_supported_is_refused(path, changes, error, message):
    with pytest.raises(error) as caught:
        check_engine(config(path, **changes))
    assert message in str(caught.value)


def test_a_platform_without_an_operator_is_refused(path, monkeypatch):
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_type="rocm")
    monkeypatch.setattr(checks, "current_platform", platform)
    with pytest.raises(UnsupportedError, match="no kernels for the platform 'rocm'"):
        check_model(AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("operator", ["cpu", "reference"])
def test_a_gpu_has_its_own_operator(monkeypatch, operator):
    monkeypatch.setattr(checks, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    for fitting in ("auto", "cuda"):
        checks.check_operator(Settings(operator=fitting))
    with pytest.raises(ConfigError, match="cannot serve on a GPU"):
        checks.check_operator(Settings(operator=operator))


def test_the_wrong_rotary_kernel_is_avoided(path):
    mla = config(path, model_config__use_mla=True)
    check_engine_but_pack(mla)
    assert mla.compilation_config.custom_ops == ["all", "-rotary_embedding"]
    for chosen in (["none"], ["all", "-rotary_embedding"]):
        mla.compilation_config.custom_ops = list(chosen)
        check_engine_but_pack(mla)
        assert mla.compilation_config.custom_ops == chosen
    mla.compilation_config.custom_ops = ["none", "+rotary_embedding"]
    with pytest.raises(UnsupportedError, match="Remove \\+rotary_embedding"):
        check_engine_but_pack(mla)
    other = config(path)
    check_engine_but_pack(other)
    assert other.compilation_config.custom_ops == ["all"]


def check_engine_but_pack(vllm_config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "open_pack", lambda *args: SimpleNamespace(layers={}, path=None))
        check_engine(vllm_config)


def test_a_missing_pack_gives_the_command(path, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with pytest.raises(PackError) as caught:
        check_engine(config(path))
    assert f"moet pack {path}" in str(caught.value)
    assert str(tmp_path / ".cache" / "moet" / "packs") in str(caught.value)
    with Checkpoint.open(path) as checkpoint, pytest.raises(PackError, match="no such pack"):
        model.open_pack(Settings(pack=tmp_path / "nowhere"), checkpoint)


def test_what_does_not_fit_the_pack_is_refused(path, tmp_path):
    pack = str(make_pack(path, tmp_path / "pack"))
    check_engine(config(path, additional_config={"moet": {"pack": pack}}))
    three = config(path, parallel_config__tensor_parallel_size=3)
    three.additional_config = {"moet": {"pack": pack}}
    with pytest.raises(UnsupportedError, match="tensor parallelism 3 does not divide"):
        check_engine(three)
    with pytest.raises(ConfigError, match="neither base nor fp4"):
        check_engine(config(path, additional_config={"moet": {"pack": pack, "precision": "int3"}}))


def test_a_model_that_is_not_here_gives_the_command(path):
    absent = config(path)
    absent.model_config.model, absent.model_config.revision = "nobody/no-such-model", None
    with pytest.raises(CheckpointError, match="hf download nobody/no-such-model"):
        model.checkpoint_path(absent)


PREFIX = "model.layers.1.mlp.experts"


def layer(**changes):
    """A layer of routed experts, as far as the checks look at it."""
    moe = {"has_bias": False, "num_experts": 8, "num_logical_experts": 8, "experts_per_token": 2}
    moe |= {key: changes.pop(key) for key in list(changes) if key in moe}
    plain = {
        "activation": MoEActivation.SILU,
        "apply_router_weight_on_input": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
    }
    return SimpleNamespace(**{**plain, **changes}, moe_config=SimpleNamespace(**moe))


def check(of):
    check_layer(of, PREFIX)
    activation_of(of, PREFIX)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": MoEActivation.GELU}, "'gelu', not SwiGLU"),
        ({"apply_router_weight_on_input": True}, "router weights on the input of 2 experts"),
        ({"has_bias": True}, "biases"),
        ({"num_experts": 9}, "fused"),
    ],
)
def test_layers_that_the_kernels_do_not_compute(changes, message):
    check_layer(layer(), PREFIX)
    with pytest.raises(UnsupportedError) as caught:
        check(layer(**changes))
    assert message in str(caught.value)
    assert PREFIX in str(caught.value)
    assert caught.value.hint.endswith("without --quantization moet.")


def test_activations_of_layers():
    assert activation_of(layer(swiglu_limit=10.0), PREFIX) == SwiGLU(10.0)
    oai = layer(activation=MoEActivation.SWIGLUOAI, has_bias=True)
    assert activation_of(oai, PREFIX) == SwiGLU(7.0, 1.702, 1.0)
    check_layer(oai, PREFIX)
    check_layer(layer(apply_router_weight_on_input=True, experts_per_token=1), PREFIX)


@pytest.mark.parametrize(
    ("changes", "geometry", "message"),
    [
        ({}, {"swiglu_limit": 10.0}, "limit=10.0"),
        ({"swiglu_limit": 7.0}, {}, "limit=7.0"),
        ({}, {"biases": True}, "biases: True"),
        ({"apply_router_weight_on_input": True}, {}, "config.json describes"),
    ],
)
def test_vllm_and_config_json_must_agree(path, changes, geometry, message):
    with Checkpoint.open(path) as checkpoint:
        stated = replace(checkpoint.geometry, **geometry)
        check_computation(layer(), PREFIX, SwiGLU(), checkpoint.geometry, ReferenceExperts())
    of = layer(**changes)
    with pytest.raises(UnsupportedError) as caught:
        check_computation(of, PREFIX, activation_of(of, PREFIX), stated, ReferenceExperts())
    assert message in str(caught.value)


def test_an_operator_without_biases_gets_none(path):
    oai = layer(activation=MoEActivation.SWIGLUOAI, has_bias=True)
    with Checkpoint.open(path) as checkpoint:
        geometry = replace(
            checkpoint.geometry, swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0, biases=True
        )
    operator = ReferenceExperts()
    check_computation(oai, PREFIX, activation_of(oai, PREFIX), geometry, operator)
    operator.name, operator.any_swiglu = "cuda", False
    with pytest.raises(UnsupportedError, match="operator 'cuda' has no biases"):
        check_computation(oai, PREFIX, activation_of(oai, PREFIX), geometry, operator)


def test_draft_layers_counted_apart_follow_the_last():
    assert layer_index("model.layers.3.mlp.experts", 48) == 3
    assert layer_index("model.layers.61.mtp_block.mlp.experts", 61) == 61
    assert layer_index("mtp.layers.0.mlp.experts", 48) == 48


def test_biases_of_down_are_weighted_and_padding_has_none():
    biases = Biases(None, torch.tensor([[1.0, 2.0], [10.0, 20.0]]))
    ids, weights = torch.tensor([[0, 1], [-1, 1]]), torch.tensor([[0.5, 2.0], [9.0, 1.0]])
    out = torch.ones(2, 2)
    biases.add_down(ids, weights, out)
    assert out.tolist() == [[21.5, 42.0], [11.0, 21.0]]


def test_an_expert_tensor_that_arrives_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"experts\.w2_weight.*without --load-format"):
        _refuse(None, None, "model.layers.1.mlp.experts.w2_weight", shard_id="w2", expert_id=0)
