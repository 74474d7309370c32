"""The quantization config: the checkpoint's own, subclassed, and pickled into other processes."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moet.errors import UnsupportedError
from moet.vllm import METHOD
from moet.vllm.config import MoetConfig, UnquantizedConfig
from moet.vllm.plugin import register
from tests.fixtures.checkpoints import write_checkpoint


@pytest.fixture(scope="module", autouse=True)
def plugin():
    register()
    register()  # vLLM may do so


def made(path):
    """The config object, by the calls that vLLM makes."""
    hf_config = AutoConfig.from_pretrained(path)
    settings = json.loads((path / "config.json").read_text()).get("quantization_config")
    registered = get_quantization_config(METHOD)
    if settings is None:
        config = registered()
    else:
        answer = registered.override_quantization_method(settings, METHOD, hf_config=hf_config)
        assert answer == METHOD
        config = registered.from_config(settings)
    config.maybe_update_config(str(path), hf_config=hf_config)
    return config


@pytest.mark.parametrize(
    ("format", "inner"),
    [("nvfp4", ModelOptNvFp4Config), ("fp8_block", Fp8Config), ("bf16", UnquantizedConfig)],
)
def test_it_is_the_checkpoints_own_config(tmp_path, format, inner):
    config = made(write_checkpoint(tmp_path, "qwen3_moe", format))
    assert isinstance(config, inner)
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float32]
    if format == "nvfp4":
        assert config.is_layer_excluded("model.layers.1.self_attn.o_proj")
    if format == "fp8_block":
        assert config.weight_block_size == [128, 128]


def test_it_survives_the_way_into_another_process(tmp_path):
    formats = ("nvfp4", "fp8_block", "bf16")
    configs = [made(write_checkpoint(tmp_path / name, "qwen3_moe", name)) for name in formats]
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(configs))
    # As in vLLM's workers, the plugin has not been loaded when this is unpickled; and numba must
    # not be loaded by it (see config.py).
    script = (
        "import pickle, sys\n"
        "configs = pickle.load(open(sys.argv[1], 'rb'))\n"
        "from vllm.model_executor.model_loader import get_model_loader\n"
        "from vllm.config.load import LoadConfig\n"
        "print(*[type(config).__mro__[2].__name__ for config in configs],\n"
        "      type(get_model_loader(LoadConfig())).__name__, 'numba' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "config.pickle")],
        capture_output=True,
        text=True,
        check=True,
    )
    inner = [type(config).__mro__[2].__name__ for config in configs]
    assert done.stdout.split()[-5:] == [*inner, "DenseLoader", "False"]


def test_without_the_flag_it_takes_no_checkpoint():
    for user in (None, "fp8"):
        assert MoetConfig.override_quantization_method({"quant_method": "fp8"}, user) is None


def test_a_quantized_dense_layer_in_float32_is_refused(tmp_path):
    config = made(write_checkpoint(tmp_path, "qwen3_moe", "nvfp4"))
    config._moet_checked = True
    layer = LinearBase.__new__(LinearBase)
    layer.params_dtype = torch.float32
    with pytest.raises(UnsupportedError) as caught:
        config.get_quant_method(layer, "model.layers.1.mlp.dense")
    assert "model.layers.1.mlp.dense is quantized" in str(caught.value)
    assert "--dtype bfloat16" in str(caught.value)


def test_the_draft_heads_own_name_decides(tmp_path):
    config = made(write_checkpoint(tmp_path, "deepseek_v3", "nvfp4"))
    config._moet_checked = True
    head = ParallelLMHead.__new__(ParallelLMHead)
    method = config.get_quant_method(head, "model.layers.3.head")
    assert isinstance(method, UnquantizedLinearMethod)


def test_an_unknown_quantization_is_refused():
    with pytest.raises(UnsupportedError, match="'squeeze' is not one that vLLM knows"):
        MoetConfig.from_config({"quant_method": "squeeze"})


def test_an_unknown_architecture_is_refused_in_process_0(tmp_path):
    path = write_checkpoint(tmp_path, "qwen3_moe", config={"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*Supported: .*Qwen3Moe"):
        made(path)
