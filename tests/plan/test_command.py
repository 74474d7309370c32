"""`moet plan` through the command line, and the recipes that `moet serve` takes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from moet.cli.plan import DOES_NOT_FIT
from moet.errors import ConfigError
from moet.pack import Pack
from moet.recipes import Recipe, find_recipe, recipe_names
from tests.cli.conftest import Ran
from tests.fixtures.checkpoints import write_checkpoint

Moet = Callable[..., Ran]
NANO = Path(__file__).parents[2] / "models" / "nano-moe"
MINIMAL = {"model": "owner/model", "hardware": "any", "status": "planned"}


def test_a_plan_is_shown(moet: Moet, headline: dict[str, Path]) -> None:
    ran = moet("plan", headline["DeepSeek-V4-Flash"], "--gpu", "5090", "--ram", "64GiB")
    assert ran.code == 0, ran.err
    for part in (
        "72,317 tensors", "routed experts", "72.6 GiB", "KV cache", "host memory, pinned",
        "decoding", "prefill", "limited by", "to go faster", "base_pool", "max-model-len: 32768",
    ):  # fmt: skip
        assert part in ran.out, part


def test_json_is_the_whole_output(moet: Moet) -> None:
    arguments = ["plan", NANO, "--gpu", "RTX PRO 6000×2", "--ram", "256GiB"]
    ran = moet(*arguments, "--json")
    content = json.loads(ran.out)
    assert (ran.code, content["fits"], content["rank"]["ranks"]) == (0, True, 2)
    assert content["tiers"]["disk"] == 0
    assert content["recipe"]["vllm"]["tensor-parallel-size"] == 2
    assert moet(*arguments, "--json").out == ran.out


def test_what_does_not_fit_has_its_own_exit_code(moet: Moet) -> None:
    arguments = ["plan", NANO, "--gpu", "1GiB:100GB/s", "--ram", "64GiB"]
    ran = moet(*arguments)
    assert ran.code == DOES_NOT_FIT == 3
    assert "does not fit" in ran.out
    assert "of the memory of each GPU are missing" in ran.out
    asked = moet(*arguments, "--json")
    content = json.loads(asked.out)
    assert (asked.code, content["fits"], content["decode"], content["recipe"]) == (
        3, False, None, None,
    )  # fmt: skip
    assert content["missing"][0] in asked.err


def test_without_a_gpu_ram_is_the_pool(moet: Moet) -> None:
    content = json.loads(moet("plan", NANO, "--gpu", "none", "--ram", "64GiB", "--json").out)
    assert content["hardware"]["gpu"] is None
    assert content["tiers"]["pool_coverage"] == 1
    assert content["decode"]["limit"]
    assert "gpu-memory-utilization" not in content["recipe"]["vllm"]


def test_this_machine_is_the_default(moet: Moet) -> None:
    ran = moet("plan", NANO, "--json")
    content = json.loads(ran.out)
    assert ran.code == 0, content["missing"]
    assert content["hardware"]["disk_free"] > 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--gpu", "RTX 5091"], ["RTX 5091", "RTX 5090", "24GiB:1000GB/s"]),
        (["--ram", "lots"], ["--ram 'lots'"]),
        (["--gpu", "5090", "--disk", "fastGB/s"], ["--disk"]),
        (["--context", "99999999"], ["--context 99,999,999", "more than the model's"]),
        (["--kv-cache-dtype", "int3"], ["int3", "fp8"]),
        (["--gpu", "5090", "--recipe", "/nowhere/x.yaml"], ["/nowhere/x.yaml"]),
        (["--gpu", "5090", "--plot", "/nowhere/x.png"], ["/nowhere/x.png"]),
    ],
)
def test_bad_options_are_refused_by_name(
    moet: Moet, arguments: list[str], parts: list[str]
) -> None:
    ran = moet("plan", NANO, *arguments)
    assert ran.code == 1
    assert "Traceback" not in ran.err
    flat = " ".join(ran.err.split())
    for part in parts:
        assert part in flat, ran.err


def test_drafts_need_draft_layers(moet: Moet, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", family="qwen3_moe")
    ran = moet("plan", model, "--gpu", "5090", "--drafts", "2")
    assert ran.code == 1
    assert "no MTP layers" in ran.err


def test_the_curve_is_a_picture(moet: Moet, tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    assert moet("plan", NANO, "--gpu", "5090", "--plot", path).code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_a_planned_recipe_is_served(
    moet: Moet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path / "m", format="nvfp4")
    recipe = tmp_path / "r.yaml"
    assert moet("plan", model, "--gpu", "none", "--ram", "64GiB", "--context", "256",
                "--streams", "2", "--recipe", recipe).code == 0  # fmt: skip
    assert yaml.safe_load(recipe.read_text())["moet"] == {"base_pool": "100%"}
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: started.append(command))
    options = ["--pack", tmp_path / "p", "--base-pool", "50%", "--max-num-seqs", "3"]
    ran = moet("serve", recipe, *options)
    assert ran.code == 0, ran.err
    (command,) = started
    assert command[command.index("serve") + 1] == str(model.resolve())
    settings = json.loads(command[command.index("--additional-config") + 1])["moet"]
    assert settings["base_pool"] == "50%"
    assert Pack.open(settings["pack"])
    assert "--max-model-len=256" in command
    # The last one counts, as for vLLM's own parser.
    assert command.index("--max-num-seqs=2") < command.index("--max-num-seqs")
    assert command[command.index("--max-num-seqs") + 1] == "3"


def test_the_recipes_that_come_with_moet_are_valid() -> None:
    assert "deepseek-v4-flash-rtx-5090" in recipe_names()
    for name in recipe_names():
        recipe = find_recipe(name)
        assert recipe is not None
        assert recipe.status == "planned"
        assert Recipe.parse(recipe.to_yaml(), name) == recipe


def test_a_model_is_no_recipe(tmp_path: Path) -> None:
    assert find_recipe("owner/model") is None
    directory = tmp_path / "model.yaml"
    directory.mkdir()
    assert find_recipe(str(directory)) is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"modle": "x"}, "'modle'"),
        ({"status": "hoped"}, "'status'"),
        ({"moet": {"base_pol": "1"}}, "Did you mean 'base_pool'"),
        ({"vllm": {"trust-remote-code": True}}, "never runs a model's code"),
        ({"vllm": {"trust_remote_code": True}}, "never runs a model's code"),
        ({"vllm": {"trust-remote-cod": True}}, "never runs a model's code"),
        ({"vllm": {"worker-cls=some.Class": True}}, "its name alone"),
        ({"vllm": {"additional-config.moet.pack": "/x"}}, "its name alone"),
        ({"vllm": {"tool-parser-plugin": "parser.py"}}, "would run code"),
        ({"vllm": {"config": "more.yaml"}}, "write its options here"),
        ({"vllm": {"--port": 1}}, "without the dashes"),
        ({"vllm": {"quantization": "fp8"}}, "always moet"),
        ({"vllm": {"port": [1]}}, "vllm.port"),
    ],
)
def test_a_malformed_recipe_is_refused_by_key(change: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Recipe.parse(yaml.safe_dump({**MINIMAL, **change}), "r.yaml")
    assert "r.yaml" in str(refused.value)
    assert part in str(refused.value)


def test_what_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml is not YAML"):
        Recipe.parse("a: [", "r.yaml")
    with pytest.raises(ConfigError, match="not a table of keys"):
        Recipe.parse("- a", "r.yaml")
    with pytest.raises(ConfigError, match="Did you mean deepseek-v4-flash-rtx-5090"):
        find_recipe("deepseek-v4-flash-rtx-509.yaml")


def test_options_become_arguments() -> None:
    vllm = {
        "max_model_len": 4096, "enforce-eager": True, "enable-prefix-caching": False,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 1},
    }  # fmt: skip
    recipe = Recipe.parse(yaml.safe_dump({**MINIMAL, "vllm": vllm}, sort_keys=False), "r")
    assert recipe.vllm_arguments() == [
        "--max-model-len=4096", "--enforce-eager", "--no-enable-prefix-caching",
        '--speculative-config={"method": "mtp", "num_speculative_tokens": 1}',
    ]  # fmt: skip


def test_a_value_cannot_become_another_option() -> None:
    vllm = {"enforce-eager": "--trust-remote-code"}
    recipe = Recipe.parse(yaml.safe_dump({**MINIMAL, "vllm": vllm}), "r")
    assert recipe.vllm_arguments() == ["--enforce-eager=--trust-remote-code"]
