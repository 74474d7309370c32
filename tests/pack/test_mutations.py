"""A pack that was changed in any way is refused, with the file and row named; none of it is served.

Each mutation goes three ways: `Pack.open`, `check_model` and reading every row as a server does;
and `verify_pack`, which reports instead of raising.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import MoetError
from moet.formats import Precision
from moet.pack import Pack, PackRowSource, RowKey, verify_pack, write_pack
from moet.pack.manifest import canonical, content_digest
from moet.quantize import QUANTIZERS
from tests.fixtures.checkpoints import write_checkpoint
from tests.pack.conftest import QUANTIZER, Case

MUTATIONS = 1000


def serve(path: Path, checkpoint: Checkpoint) -> list[str]:
    """What a server that reads every row would say: the errors, none if all rows are valid."""
    try:
        pack = Pack.open(path)
        pack.check_model(checkpoint)
        source = PackRowSource(pack, checkpoint)
    except MoetError as error:
        return [error.message]
    errors = []
    with source:
        for layer in source.layers:
            for precision in (Precision.BASE, pack.layers[layer].layout.fp4.precision):
                row = np.empty(source.layouts[precision].row_bytes, np.uint8)
                for expert in range(source.num_experts):
                    try:
                        source.read(RowKey(layer, expert, precision), row)
                    except MoetError as error:
                        errors.append(error.message)
    return errors


class Victim:
    """A pack that mutations damage and `restore` mends; `other` is a pack of another model."""

    def __init__(self, pack: Path, other: Path, rng: random.Random) -> None:
        self.pack, self.other, self.rng = pack, other, rng
        self.original = {path.name: path.read_bytes() for path in pack.iterdir()}
        self.layers = sorted(name for name in self.original if name != "moet.json")

    def restore(self) -> None:
        for path in self.pack.iterdir():
            path.unlink()
        for name, content in self.original.items():
            (self.pack / name).write_bytes(content)

    def any_file(self) -> Path:
        return self.pack / self.rng.choice([*self.layers, "moet.json"])

    def any_layer(self) -> Path:
        return self.pack / self.rng.choice(self.layers)


Mutation = Callable[[Victim], str]  # damages the pack; returns the file that is to be named


def flip_a_bit(victim: Victim) -> str:
    path = victim.any_file()
    content = bytearray(path.read_bytes())
    content[victim.rng.randrange(len(content))] ^= 1 << victim.rng.randrange(8)
    path.write_bytes(content)
    return path.name


def flip_a_bit_of_the_digests(victim: Victim) -> str:
    """The few bytes after the rows, which a flip anywhere would seldom hit."""
    path = victim.any_layer()
    content = bytearray(path.read_bytes())
    content[-victim.rng.randrange(1, len(content) % 4096 + 1)] ^= 1 << victim.rng.randrange(8)
    path.write_bytes(content)
    return path.name


def truncate(victim: Victim) -> str:
    path = victim.any_file()
    content = path.read_bytes()
    path.write_bytes(content[: victim.rng.randrange(len(content))])
    return path.name


def extend(victim: Victim) -> str:
    path = victim.any_file()
    path.write_bytes(path.read_bytes() + victim.rng.randbytes(victim.rng.randrange(1, 5000)))
    return path.name


def zero_a_block(victim: Victim) -> str:
    """As a file system does after a crash."""
    path = victim.any_file()
    content = bytearray(path.read_bytes())
    start = victim.rng.randrange(0, len(content), 4096)
    stop = min(start + 4096, len(content))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)
    return path.name


def remove(victim: Victim) -> str:
    path = victim.any_file()
    path.unlink()
    return path.name


def swap_rows(victim: Victim) -> str:
    """Two experts of one layer change places, digests and all the rest as they were."""
    path = victim.any_layer()
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    experts, size = header["base"]["shape"]
    one, two = victim.rng.sample(range(experts), 2)
    at = [slice(begin + expert * size, begin + (expert + 1) * size) for expert in (one, two)]
    content[at[0]], content[at[1]] = content[at[1]], content[at[0]]
    path.write_bytes(content)
    return path.name


def swap_layers(victim: Victim) -> str:
    one, two = victim.rng.sample(victim.layers, 2)
    (victim.pack / one).write_bytes(victim.original[two])
    (victim.pack / two).write_bytes(victim.original[one])
    return min(one, two)


def take_a_layer_of_another_model(victim: Victim) -> str:
    path = victim.any_layer()
    shutil.copy(victim.other / path.name, path)
    return path.name


def take_the_description_of_another_model(victim: Victim) -> str:
    shutil.copy(victim.other / "moet.json", victim.pack)
    return victim.layers[0]


def take_another_model(victim: Victim) -> str:
    for path in victim.other.iterdir():
        shutil.copy(path, victim.pack)
    return victim.pack.name


def link(victim: Victim) -> str:
    """A symbolic link, even to the right content."""
    path = victim.any_file()
    moved = victim.pack / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    return path.name


def edit(victim: Victim) -> str:
    """Somebody changes a value in moet.json, in its canonical form, and forgets the digest."""
    content = json.loads(victim.original["moet.json"])
    _change(victim.rng, content)
    (victim.pack / "moet.json").write_bytes(canonical(content))
    return "moet.json"


def edit_and_seal(victim: Victim) -> str:
    """The same, with the digest made to fit: then the files do not."""
    content = json.loads(victim.original["moet.json"])
    for key in ("writer", "quantizer"):
        del content[key]  # a pack that says otherwise of its making is another pack, and valid
    for entry in content["layers"]:
        del entry["statistics"], entry["source"]
    del content["model"]["name"], content["model"]["revision"]
    kept = json.loads(victim.original["moet.json"])
    del content["digest"]
    _change(victim.rng, content)
    _merge(kept, content)
    kept["digest"] = content_digest(kept)
    (victim.pack / "moet.json").write_bytes(canonical(kept))
    return "moet.json|layer-|pack"


def rewrite(victim: Victim) -> str:
    """The same content in another form: indented otherwise, keys in another order."""
    content = json.loads(victim.original["moet.json"])
    text = json.dumps(content, indent=victim.rng.choice([None, 0, 2, 4]))
    (victim.pack / "moet.json").write_text(text + "\n" * victim.rng.randrange(2))
    return "moet.json"


def _change(rng: random.Random, content: dict) -> None:
    """Changes one leaf, or removes or adds one key, anywhere."""
    places = list(_leaves(content))
    parent, key = rng.choice(places)
    value = parent[key]
    choice = rng.randrange(10)
    if choice == 0 and isinstance(parent, dict):
        del parent[key]
    elif choice == 1 and isinstance(parent, dict):
        parent[f"{key}_"] = value
    elif isinstance(value, bool) or value is None:
        parent[key] = 1
    elif isinstance(value, int | float):
        parent[key] = rng.choice([value + 1, -value - 1, value * 2 + 1, 10**30, "1", None, 0.5])
    else:
        parent[key] = rng.choice([f"{value}x", value[1:], "../" + value, "", 7, None])


def _leaves(node: dict | list) -> Iterator[tuple[dict | list, str | int]]:
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, dict | list) and value:
            yield from _leaves(value)
        else:
            yield node, key


def _merge(kept: dict, changed: dict) -> None:
    """Puts what `changed` holds into `kept`; what neither holds stays removed or as it was."""
    for key, value in changed.items():
        if isinstance(value, dict):
            _merge(kept[key], value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for one, two in zip(kept[key], value, strict=True):
                _merge(one, two)
        else:
            kept[key] = value


FEW: list[Mutation] = [remove, take_the_description_of_another_model, take_another_model, link]
MANY: list[Mutation] = [
    flip_a_bit,
    flip_a_bit_of_the_digests,
    truncate,
    extend,
    zero_a_block,
    swap_rows,
    swap_layers,
    take_a_layer_of_another_model,
    edit,
    edit_and_seal,
    rewrite,
]


@pytest.fixture(scope="module")
def victim(
    make_case: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Victim]:
    directory = tmp_path_factory.mktemp("victim")
    other_model = write_checkpoint(
        directory / "other-model", "deepseek_v3", "nvfp4",
        experts=4, layers=2, vocab=64, mtp_format="bf16", seed=1,
    )  # fmt: skip
    with Checkpoint.open(other_model) as checkpoint:
        write_pack(checkpoint, directory / "other", quantizer=QUANTIZERS[QUANTIZER]())
    pack = shutil.copytree(make_case("deepseek-nvfp4").pack, directory / "pack")
    return Victim(pack, directory / "other", random.Random(0))


def test_no_mutation_is_served(victim: Victim, nvfp4: Case) -> None:
    with Checkpoint.open(nvfp4.checkpoint) as checkpoint:
        assert serve(victim.pack, checkpoint) == []
        assert verify_pack(victim.pack, checkpoint=checkpoint) == []
        done = number = 0
        while done < MUTATIONS:
            number += 1
            mutations = FEW if number % 20 == 0 else MANY
            mutation = mutations[
                number // 20 % len(FEW) if mutations is FEW else number % len(MANY)
            ]
            named = mutation(victim).split("|")
            now = {path.name: path.read_bytes() for path in victim.pack.iterdir()}
            if now != victim.original or mutation is link:  # else it hit what was so before
                done += 1
                what = f"mutation {number}, {mutation.__name__}"
                errors = serve(victim.pack, checkpoint)
                assert errors, f"{what} is served"
                assert any(name in errors[0] for name in named), f"{what}: {errors[0]}"
                problems = verify_pack(victim.pack, checkpoint=checkpoint)
                assert problems, f"{what} is verified"
                assert any(name in str(problems[0]) for name in named), f"{what}: {problems[0]}"
            victim.restore()
        assert serve(victim.pack, checkpoint) == []
