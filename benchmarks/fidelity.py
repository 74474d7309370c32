"""KL and top-1 agreement with the model at FP4, on held-out text: every level, and static maps.

    python benchmarks/fidelity.py MODEL --tokens calibration.bin --work DIR

MODEL is a checkpoint directory with BF16 dense layers and the tokenizer of the windows. Everything
goes the way that a user's model goes: `moet calibrate`, `moet pack` at each level, `moet map`, and
what is compared are the packs' rows. Where the checkpoint is not FP4, its FP4 twin is used
(`moet.eval.twin`), so that every level is measured against what it was made from.

Calibrates on evenly spaced windows of the tokens, as many in each of their kinds as they are equal
in length; measures on the windows of models/nano-moe, which are of other text. Finished steps in
DIR are kept, so a run that stops goes on; `--only` takes the steps apart. Writes
bench/results/fidelity-NAME.json when all rows are there. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from moet.bench.results import Row, write_result
from moet.checkpoints import Checkpoint
from moet.eval.fidelity import Fidelity, compare
from moet.eval.heldout import read_heldout
from moet.eval.pack import packed_experts
from moet.eval.reference import Experts, fill_experts, load_reference, relative_rms
from moet.eval.sources import fp4_experts, power_of_two_experts
from moet.eval.twin import write_fp4_twin
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource, inspect_pack
from moet.vllm.precision import fp4_experts as mapped_experts

LEVELS = (0, 1, 2, 3)
PERCENTS = (5, 10, 20, 50)
MAP_LEVEL = 3
TOKENS, WINDOW = 131_072, 512
# float32 throughout: what is measured is the base, not the arithmetic of the model around it.
ENGINE = {
    "dtype": "float32",
    "attention_backend": "CPU_MLA",
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": WINDOW,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--windows", type=Path, default=Path("models/nano-moe"), metavar="DIR")
    parser.add_argument("--only", choices=("pack", "measure"), help="one half of the work")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = twin(options.model, options.work)
    if options.only != "measure":
        make(model, options.tokens, options.work)
    if options.only == "pack":
        return
    rows = list(measure(model, options.work, options.windows, options.model.name))
    write_result(Path(f"bench/results/fidelity-{options.model.name}.json"), rows)


def twin(model: Path, work: Path) -> Path:
    """The model itself if it is FP4, else its FP4 twin."""
    with Checkpoint.open(model) as checkpoint:
        first = checkpoint.geometry.moe_layers[0]
        if checkpoint.expert_format(first) in (Precision.MXFP4, Precision.NVFP4):
            return model
        directory = work / "model"
        return directory if directory.exists() else write_fp4_twin(checkpoint, directory)


def make(model: Path, tokens: Path, work: Path) -> None:
    """The calibration, a pack for each level, and the maps."""
    engine = ["--engine", json.dumps(ENGINE)]
    calibration = ["--calibration", work / "calibration"]
    pack_0 = work / "level-0"
    run(pack_0, "pack", model, "-o", pack_0)
    run(work / "calibration", "calibrate", model, "--tokens", tokens, "-o", work / "calibration",
        "--count", TOKENS, "--window", WINDOW, "--pack", pack_0, *engine)  # fmt: skip
    for level in LEVELS[1:]:
        extra = [*engine, "--set", f"pack={pack_0}"] if level == 3 else []
        out = work / f"level-{level}"
        run(out, "pack", model, "-o", out, "--level", level, *calibration, *extra)
    for percent in PERCENTS:
        out = work / f"map-{percent}.json"
        run(out, "map", model, *calibration, "--pack", work / f"level-{MAP_LEVEL}",
            "--budget", f"{percent}%", "-o", out)  # fmt: skip


def run(product: Path, *arguments: object) -> None:
    """A `moet` command, unless its product is there."""
    if not product.exists():
        command = [sys.executable, "-m", "moet", *map(str, arguments)]
        print("$", *command[2:], flush=True)
        subprocess.run(command, check=True)


def measure(model: Path, work: Path, windows: Path, name: str) -> Iterator[Row]:
    """A row for the scheme that every level must beat, each level, and each map."""
    heldout = read_heldout(windows)
    found: dict[str, Fidelity] = {}
    with Checkpoint.open(model) as checkpoint:
        fp4 = fp4_experts(checkpoint)
        reference, candidate = (load_reference(checkpoint, fp4) for _ in range(2))
        remembered = Remembered(reference)

        def row(
            key: str, experts: Experts, level: int | None, percent: float, **more: object
        ) -> Row:
            kept = work / f"measured-{key}.npz"
            fill_experts(candidate, checkpoint, experts)
            if kept.exists():
                found[key] = Fidelity(heldout.segments, *np.load(kept)["means"])
            else:
                found[key] = compare(remembered, candidate, heldout)
                np.savez(kept, means=[found[key].kl, found[key].top1, found[key].nll])
            of = found[key].rows()
            values: Row = {
                "model": name,
                "level": level,
                "map_percent": percent,
                "tau": 0,
                "fired": 0,
                "kl": of[-1].kl,
                "kl_se": of[-1].kl_se,
                "top1": of[-1].top1,
                "nll": of[-1].nll,
                "rms": relative_rms(reference, candidate),
                **more,
                "kl_by_text": {segment.segment: segment.kl for segment in of[:-1]},
            }
            print(json.dumps(values), flush=True)
            return values

        yield row("reference", power_of_two_experts(fp4), None, 0)
        for level in LEVELS:
            pack = Pack.open(work / f"level-{level}")
            with PackRowSource(pack, checkpoint) as source:
                base = packed_experts(source, Precision.BASE)
                about = inspect_pack(pack.path).statistics
                more = {"bias": about["bias"], "zeros": about["zero_fraction"]}
                yield row(f"level-{level}", base, level, 0, **more) | difference(found, level)
        with PackRowSource(pack, checkpoint) as source:
            base = packed_experts(source, Precision.BASE)
            for percent in PERCENTS:
                where = mapped_experts(
                    str(work / f"map-{percent}.json"),
                    checkpoint.geometry,
                    checkpoint.identity,
                    pack.path,
                )

                def mixed(layer: int, expert: int, where: object = where) -> object:
                    return (fp4 if where[layer][expert] else base)(layer, expert)

                yield row(f"map-{percent}", mixed, MAP_LEVEL, percent)


class Remembered(nn.Module):
    """A model that computes the logits of the same tokens once only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.known = model, {}

    def forward(self, ids: Tensor, use_cache: bool) -> SimpleNamespace:
        key = ids.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.model(ids, use_cache=use_cache).logits
        return SimpleNamespace(logits=self.known[key])


def difference(found: dict[str, Fidelity], level: int) -> Row:
    """The step from the level before: windows differ more than levels, so it is paired."""
    before = "reference" if level == 0 else f"level-{level - 1}"
    change, error = found[f"level-{level}"].kl_difference(found[before])
    return {"kl_change": change, "kl_change_se": error}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
