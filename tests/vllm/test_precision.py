"""The precision policy: base, fp4, and map files that are checked key by key."""

import json

import numpy as np
import pytest

from moet.checkpoints.base import Geometry
from moet.errors import ConfigError
from moet.vllm.precision import fp4_experts, named_map

GEOMETRY = Geometry(
    architecture="DeepseekV3ForCausalLM",
    hidden=64,
    intermediate=64,
    num_experts=4,
    top_k=2,
    num_layers=3,
    moe_layers=(1, 2, 3),
    mtp_layers=(3,),
    swiglu_limit=None,
)
MODEL = "ab" * 32


def chosen(setting):
    return {
        layer: np.flatnonzero(mask).tolist()
        for layer, mask in fp4_experts(str(setting), GEOMETRY, MODEL).items()
    }


def write(path, **content):
    path.write_text(json.dumps({"model": MODEL, **content}))
    return path


def test_base_keeps_the_draft_head_at_fp4():
    assert chosen("base") == {1: [], 2: [], 3: [0, 1, 2, 3]}


def test_fp4_is_everything():
    assert chosen("fp4") == {layer: [0, 1, 2, 3] for layer in (1, 2, 3)}


def test_a_map_names_the_exceptions(tmp_path):
    path = write(tmp_path / "map.json", default="base", fp4={"1": [0, 3]}, base={"3": "all"})
    assert chosen(path) == {1: [0, 3], 2: [], 3: []}
    path = write(tmp_path / "map.json", default="fp4", base={"2": [1]})
    assert chosen(path) == {1: [0, 1, 2, 3], 2: [0, 2, 3], 3: [0, 1, 2, 3]}


def test_a_map_beside_the_pack_goes_by_its_name(tmp_path):
    pack = tmp_path / "m.moet"
    named_map(pack, "tenth").parent.mkdir()
    write(named_map(pack, "tenth"), fp4={"1": [2]})
    found = fp4_experts("tenth", GEOMETRY, MODEL, pack)
    assert {layer: np.flatnonzero(mask).tolist() for layer, mask in found.items()} == {
        1: [2],
        2: [],
        3: [0, 1, 2, 3],
    }
    with pytest.raises(ConfigError, match=r"'fifth' is neither base nor fp4, nor a map of this"):
        fp4_experts("fifth", GEOMETRY, MODEL, pack)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"default": "fp8"}, "default: "),
        ({"layers": {}}, "layers: "),
        ({"fp4": {"0": [1]}}, "fp4.0: the model has no routed experts in that layer. Its layers"),
        ({"fp4": {"first": [1]}}, "fp4.first: the model has no routed experts"),
        ({"fp4": {"1": [4]}}, "fp4.1: there is no expert 4. A layer has experts 0 to 3."),
        ({"fp4": {"1": [-1]}}, "fp4.1."),
        ({"fp4": {"1": "most"}}, "fp4.1."),
        ({"fp4": {"1": [0]}, "base": {"1": [1]}}, "layer 1 is in both base and fp4"),
        ({"model": "cd" * 32}, "the map is for the model 'cdcdcdcdcdcd'"),
    ],
)
def test_a_wrong_map_is_refused_by_key(tmp_path, content, message):
    path = write(tmp_path / "map.json", **content)
    with pytest.raises(ConfigError) as caught:
        chosen(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_no_map_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither base nor fp4"):
        chosen(tmp_path / "absent.json")
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        chosen(tmp_path / "text")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ConfigError, match="the whole file"):
        chosen(tmp_path / "list")
