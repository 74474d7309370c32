"""Makes models/nano-moe: the BF16 model in the layout of NVIDIA's NVFP4 DeepSeek checkpoints.

    python scripts/convert_nano_moe.py SRC DST --text DIR

SRC has the BF16 checkpoint as trained. DIR has `validation.bin` (uint16 tokens that the model was
not trained on) and `meta.json` (where each kind of text is in it). DST gets the checkpoint, its
card, NOTICE and held-out windows.

Routed experts, those of the draft layer included, become NVFP4; everything else stays as it is.
Both scale rules of `moet.formats.nvfp4` are tried, and the one with the lower KL to the BF16 model
on the held-out windows is kept. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from moet.checkpoints import PROJECTIONS, Checkpoint, ExpertWeights
from moet.eval.fidelity import Fidelity, compare
from moet.eval.heldout import HeldOut, cut_windows, write_heldout
from moet.eval.reference import Experts, fill_experts, load_reference
from moet.formats import FORMATS
from nano_moe_card import CHAT_TEMPLATE, NOTICE, card

RULES = ("amax", "least_error")
WINDOWS, LENGTH = 16, 512
SUFFIXES = {"weight": "codes", "weight_scale": "scale", "weight_scale_2": "global_scale"}
# Activations are not quantized here, so nothing was calibrated: the factor that changes nothing.
INPUT_SCALE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parser.add_argument("--text", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)

    heldout = read_text(options.text)
    write_heldout(
        options.target,
        heldout,
        f"{WINDOWS} evenly spaced windows of {LENGTH} + 1 tokens from each kind of text that was "
        "held out of training; see README.md for the sources",
    )
    with Checkpoint.open(options.source) as source:
        candidates = {rule: encode(source, rule) for rule in RULES}
        fidelity = measure(source, candidates, heldout)
        rule = min(RULES, key=lambda rule: fidelity[rule].rows()[-1].kl)
        tensors = {
            name: source.read_tensor(name)
            for name in source.tensors
            if not source.is_expert_tensor(name)
        }
        dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
        tensors.update(candidates[rule])
        save_file(tensors, options.target / "model.safetensors", {"format": "pt"})
        write_configs(source, options.target)
    copy_tokenizer(options.source, options.target)
    (options.target / "NOTICE").write_text(NOTICE)
    sizes = {
        "source": sum(ref.nbytes for ref in source.tensors.values()),
        "dense": dense_bytes,
        "experts": sum(tensor.nbytes for tensor in candidates[rule].values()),
        "file": (options.target / "model.safetensors").stat().st_size,
    }
    (options.target / "README.md").write_text(card(sizes, rule, fidelity))
    print(f"{rule}: {sizes['file']:,} bytes in {options.target}")


def read_text(directory: Path) -> HeldOut:
    segments = json.loads((directory / "meta.json").read_text())["validation"]
    stream = np.fromfile(directory / "validation.bin", dtype="<u2")
    places = {segment["name"]: (segment["start"], segment["end"]) for segment in segments}
    return cut_windows(stream, places, WINDOWS, LENGTH)


def encode(source: Checkpoint, rule: str) -> dict[str, Tensor]:
    """Every routed expert's NVFP4 tensors by checkpoint name."""
    geometry, tensors = source.geometry, {}
    for layer in geometry.moe_layers:
        for expert in range(geometry.num_experts):
            matrices = encode_expert(source.decode_expert(layer, expert), rule)
            for projection, parts in zip(PROJECTIONS, matrices, strict=True):
                prefix = source.family.expert_prefix(source.geometry, layer, expert, projection)
                for suffix, part in SUFFIXES.items():
                    tensors[f"{prefix}.{suffix}"] = parts[part]
                tensors[f"{prefix}.input_scale"] = torch.tensor(INPUT_SCALE)
    return tensors


def encode_expert(weights: ExpertWeights, rule: str) -> Iterator[dict[str, Tensor]]:
    """The parts of gate, up and down.

    gate and up share one global scale, as ModelOpt's do: kernels compute both in one product.
    """
    nvfp4 = FORMATS["nvfp4"]
    both = nvfp4.encode(torch.cat([weights.gate, weights.up]), rule)
    for half in range(2):
        rows = slice(half * len(weights.gate), (half + 1) * len(weights.gate))
        yield {
            "codes": both["codes"][rows].contiguous(),
            "scale": both["scale"][rows].contiguous(),
            "global_scale": both["global_scale"].clone(),
        }
    yield nvfp4.encode(weights.down, rule)


def measure(
    source: Checkpoint, candidates: dict[str, dict[str, Tensor]], heldout: HeldOut
) -> dict[str, Fidelity]:
    """Each candidate against the BF16 model."""
    reference = load_reference(source, source.decode_expert)
    model = load_reference(source, source.decode_expert)
    results = {}
    for rule, tensors in candidates.items():
        fill_experts(model, source, decoder(source, tensors))
        results[rule] = compare(reference, model, heldout)
        row = results[rule].rows()[-1]
        print(f"{rule}: KL to BF16 {row.kl:.4f} ± {row.kl_se:.4f}, same top-1 {row.top1:.1%}")
    return results


def decoder(source: Checkpoint, tensors: dict[str, Tensor]) -> Experts:
    def experts(layer: int, expert: int) -> ExpertWeights:
        matrices = []
        for projection in PROJECTIONS:
            prefix = source.family.expert_prefix(source.geometry, layer, expert, projection)
            parts = {part: tensors[f"{prefix}.{suffix}"] for suffix, part in SUFFIXES.items()}
            matrices.append(FORMATS["nvfp4"].decode(parts))
        return ExpertWeights(*matrices)

    return experts


def write_configs(source: Checkpoint, target: Path) -> None:
    """config.json and hf_quant_config.json, as ModelOpt writes them beside each other."""
    geometry, config = source.geometry, source.config
    layers = range(config["num_hidden_layers"] + config["num_nextn_predict_layers"])
    excluded = ["lm_head", "model.embed_tokens"]
    for layer in layers:
        name = f"model.layers.{layer}"
        excluded.append(f"{name}.self_attn*")
        if layer in geometry.moe_layers:
            excluded += [f"{name}.mlp.gate", f"{name}.mlp.shared_experts*"]
        else:
            excluded.append(f"{name}.mlp*")
        if layer in geometry.mtp_layers:
            excluded += [f"{name}.eh_proj", f"{name}.shared_head*"]
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    # "modelopt" is the name of the layout, which readers look for; version tells who wrote it.
    producer = {"name": "modelopt", "version": "moet"}
    quantization = {
        "config_groups": {
            "group_0": {"input_activations": fp4, "weights": fp4, "targets": ["Linear"]}
        },
        "ignore": excluded,
        "quant_algo": "NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
    }
    write_json(target / "config.json", {**config, "quantization_config": quantization})
    modelopt = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": excluded,
    }
    write_json(target / "hf_quant_config.json", {"producer": producer, "quantization": modelopt})
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # A model of this size wanders at temperature 1 and loops at 0.
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    write_json(target / "generation_config.json", tokens | sampling)


def copy_tokenizer(source: Path, target: Path) -> None:
    """The tokenizer without indentation (half its size), and with a chat template."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (target / "tokenizer.json").write_text(compact)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    write_json(target / "tokenizer_config.json", settings | {"chat_template": CHAT_TEMPLATE})


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
