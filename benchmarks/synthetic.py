"""A model at DeepSeek-V4-Flash's MoE geometry that exists only as a config.json.

DeepSeek-V3's form: 43 layers of 256 experts, six a token, hidden 4096, experts 2048 wide; random
weights (`--load-format dummy`), and a router that prefers the same experts most of the time.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import torch

from moet.vllm.worker import MoetWorkerExtension

LAYERS, EXPERTS, TOP_K = 43, 256, 6
HOT_EXPERTS = 49  # of a layer: 19 %
HOT_SHARE = 0.96  # of the routings

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["*self_attn*", "*shared_experts*", "*mlp.gate", "lm_head", "*embed_tokens"],
}
"""A `quantization_config`: the routed experts in NVFP4, all else in BF16."""


def write_model(directory: Path, **changes: Any) -> Path:
    """Writes the config.json; `changes` replace keys of it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def bias_for(experts: int, hot: int, top_k: int, share: float) -> float:
    """What to add to the scores of the hot experts for them to get a share of all routings.

    Scores are sigmoids of standard normal logits, as `SyntheticExtension.moet_prepare` makes them.
    """
    scores = torch.randn(20_000, experts, generator=torch.Generator().manual_seed(0)).sigmoid()
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        biased = scores.clone()
        biased[:, :hot] += middle
        found = float((biased.topk(top_k).indices < hot).float().mean())
        low, high = (middle, high) if found < share else (low, middle)
    return (low + high) / 2


class SyntheticExtension(MoetWorkerExtension):
    """Worker methods of the benchmark."""

    vllm_config: Any
    model_runner: Any

    def moet_prepare(self, hot: int, share: float) -> float:
        """Makes hidden states depend on the token, and the router prefer `hot` experts of each
        layer, another choice in each. Returns the bias."""
        model = self.model_runner.model
        generator = torch.Generator("cuda").manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)
            elif "embed_tokens" in name:
                parameter.data.normal_(generator=generator)
        config = self.vllm_config.model_config.hf_config
        bias = bias_for(config.n_routed_experts, hot, config.num_experts_per_tok, share)
        for name, module in model.named_modules():
            if not name.endswith(".mlp.gate"):
                continue
            weight = module.weight.data
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
            chosen = torch.randperm(len(weight), generator=generator, device="cuda")[:hot]
            module.e_score_correction_bias.data.zero_()
            module.e_score_correction_bias.data[chosen] = bias
        return bias

    def moet_read_past_the_cache(self, path: str) -> None:
        """From now on rows are read from the disk itself."""
        from moet.vllm.method import find_runtime

        source: Any = find_runtime(self.vllm_config).source  # type: ignore[union-attr]
        fd = source._file._fd
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def moet_host_peak(self) -> int:
        """The most bytes that this process has had in memory."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmHWM")
