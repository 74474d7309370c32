"""KL and top-1 agreement of the 2-bit base with the model at FP4, on held-out text.

    python benchmarks/fidelity.py models/nano-moe [MODEL …]

Each MODEL is a checkpoint directory with BF16 dense layers and the tokenizer of the windows. The
model at FP4 is the checkpoint itself where its experts are FP4, else its experts in MXFP4. Compared
with it: level 0, and the unfitted scheme that every level must beat. Writes
bench/results/fidelity-level0.json; some minutes on two cores.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from moet.bench.results import Row, write_result
from moet.checkpoints import Checkpoint
from moet.eval.fidelity import compare
from moet.eval.heldout import HeldOut, read_heldout
from moet.eval.reference import fill_experts, load_reference, relative_rms
from moet.eval.sources import fp4_experts, power_of_two_experts, two_bit_experts
from moet.quantize import QUANTIZERS

RESULT = Path("bench/results/fidelity-level0.json")
REFERENCE, LEVEL_0 = "reference scheme", "level 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--windows", type=Path, default=Path("models/nano-moe"), metavar="DIR")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    heldout = read_heldout(options.windows)
    rows = [row for model in options.models for row in measure(model, heldout)]
    write_result(options.output, rows)


def measure(path: Path, heldout: HeldOut) -> list[Row]:
    """Rows of one model: a scheme × (each segment, and their mean)."""
    rows, found = [], {}
    with Checkpoint.open(path) as checkpoint:
        fp4 = fp4_experts(checkpoint)
        schemes = {
            REFERENCE: power_of_two_experts(fp4),
            LEVEL_0: two_bit_experts(fp4, QUANTIZERS["data-free"]()),
        }
        name = checkpoint.name
        reference, candidate = (load_reference(checkpoint, fp4) for _ in range(2))
        for scheme, experts in schemes.items():
            fill_experts(candidate, checkpoint, experts)
            rms = relative_rms(reference, candidate)
            found[scheme] = compare(reference, candidate, heldout)
            for row in found[scheme].rows():
                rows.append({"model": name, "scheme": scheme, **asdict(row), "rms": rms})
                print(f"{name} {scheme}: {row}, rms {rms:.4f}", flush=True)
    # The schemes run on the same windows: only the paired difference tells them apart.
    difference, error = found[LEVEL_0].kl_difference(found[REFERENCE])
    rows[-1] |= {"kl_minus_reference": difference, "kl_minus_reference_se": error}
    print(f"{name} level 0 − reference scheme: KL {difference:+.4f} ± {error:.4f}")
    return rows


if __name__ == "__main__":
    main()
