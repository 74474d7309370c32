"""`moet eval` through real engines, and what cannot work, said before any engine starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moet.bench.results import read_result
from moet.checkpoints import Checkpoint
from moet.cli.main import app
from moet.errors import MoetError
from moet.eval.heldout import HeldOut, read_heldout, write_heldout
from moet.eval.likeliest import Likeliest
from moet.eval.pack import fidelity_of_pack
from moet.eval.reference import load_reference
from moet.eval.served import compare_served
from moet.eval.sources import fp4_experts
from moet.pack import Pack
from tests.cli.conftest import Ran
from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.serving import NANO, make_pack

Moet = Callable[..., Ran]
COUNT, WINDOW = 512, 64
# As in transformers; the AMX backend, vLLM's first choice on some CPUs, takes no float32.
ENGINE = {"dtype": "float32", "attention_backend": "CPU_MLA", "kv_cache_memory_bytes": 64 << 20}
OPTIONS = ["--count", str(COUNT), "--window", str(WINDOW), "--engine", json.dumps(ENGINE)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(NANO, tmp_path_factory.mktemp("nano") / "nano.moet")


@pytest.fixture(scope="module")
def windows() -> HeldOut:
    """What the command runs of nano-moe's held-out windows with these options."""
    heldout = read_heldout(NANO)
    return HeldOut(heldout.segments, heldout.tokens[:, : COUNT // (4 * WINDOW), :WINDOW])


@torch.no_grad()
def in_transformers(windows: HeldOut, top: int) -> list[Likeliest]:
    """What an engine would tell of the model at FP4."""
    with Checkpoint.open(NANO) as checkpoint:
        model = load_reference(checkpoint, fp4_experts(checkpoint))
    told = []
    for ids in torch.from_numpy(windows.tokens).flatten(0, 1):
        logprobs = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        named = torch.cat([ids[1:, None], logprobs.topk(top).indices], 1)
        told.append(Likeliest(named.int().numpy(), logprobs.gather(1, named).numpy()))
    return told


@dataclass(frozen=True)
class Run:
    """One run of the command with both engines.

    report: what it printed. content: the result file. engines: the settings of each, and what it
    told.
    """

    report: dict[str, Any]
    content: dict[str, Any]
    engines: list[tuple[dict[str, Any], list[Likeliest]]]


@pytest.fixture(scope="module")
def run(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    import moet.vllm.likeliest as asked

    engine, engines = asked.likeliest, []

    def noted(model: Path, settings: dict[str, Any], *rest: Any) -> list[Likeliest]:
        engines.append((settings, engine(model, settings, *rest)))
        return engines[-1][1]

    result = tmp_path_factory.mktemp("results") / "new" / "r.json"
    command = ["eval", str(NANO), "--pack", str(pack), *OPTIONS, "--set", "base_pool=50%"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asked, "likeliest", noted)
        ran = CliRunner().invoke(
            app, [*command, "-o", str(result), "--json"], catch_exceptions=False
        )
    assert ran.exit_code == 0
    return Run(json.loads(ran.stdout), read_result(result), engines)


@pytest.mark.server
def test_the_pack_against_the_exact_kl(run: Run, pack: Path, windows: HeldOut) -> None:
    rows = run.report["rows"]
    with Checkpoint.open(NANO) as checkpoint:
        exact = fidelity_of_pack(checkpoint, Pack.open(pack), windows).rows()
    assert [row["segment"] for row in rows] == [*windows.segments, "mean"]
    for found, expected in zip(rows, exact, strict=True):
        assert found["kl"] < expected.kl + 1e-4
        assert found["nll"] == pytest.approx(expected.nll, abs=1e-4)
        assert found["top1"] == pytest.approx(expected.top1, abs=0.01)
        assert found["nll_change"] == pytest.approx(found["nll"] - found["nll_reference"])
        assert found["nll_change_se"] > 0
        assert found["top1_se"] >= 0
    assert rows[-1]["kl"] > 0.7 * exact[-1].kl
    assert rows[-1]["tokens"] == 8 * (WINDOW - 1)


@pytest.mark.server
def test_fp4_is_no_distance_from_fp4(run: Run, windows: HeldOut) -> None:
    """What the FP4 engine told, as the candidate; the reference is transformers'."""
    settings, told = run.engines[0]
    assert settings["precision"] == "fp4"
    rows = compare_served(windows.segments, in_transformers(windows, 64), told).rows()
    for row in rows:
        assert row.kl == pytest.approx(0, abs=1e-5)
        assert row.top1 == 1
        assert row.nll_change == pytest.approx(0, abs=1e-5)


@pytest.mark.server
def test_the_result_says_what_was_compared(run: Run, pack: Path) -> None:
    assert run.content["rows"] == run.report["rows"]
    with Checkpoint.open(NANO) as checkpoint:
        identity = checkpoint.identity
    for about in (run.report, run.content["environment"]):
        assert about["model"] == {"name": "nano-moe", "revision": None, "identity": identity}
        assert about["pack"] == {"digest": Pack.open(pack).digest, "level": 0}
        assert about["settings"] == {"precision": "base", "base_pool": "50%"}
        assert (about["fp4_experts"], about["likeliest"]) == (0, 64)
        assert (about["windows"]["each"], about["windows"]["tokens"]) == (2, WINDOW)
        assert about["engine"] == ENGINE
        assert "lower bound" in about["note"]


def test_prompts_at_fp4_are_the_candidates(
    moet: Moet, pack: Path, windows: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the engines only what they are asked for: the reference has no settings of prompts."""
    asked: list[dict[str, Any]] = []

    def same(model: Path, settings: dict[str, Any], *rest: Any) -> list[Likeliest]:
        asked.append(settings)
        return in_transformers(windows, 64)

    monkeypatch.setattr("moet.vllm.likeliest.likeliest", same)
    ran = moet("eval", NANO, "--pack", pack, *OPTIONS, "--set", "prefill_precision=fp4")
    assert ran.code == 0, ran.err
    own = {"pack": str(pack)}
    assert asked == [
        {**own, "precision": "fp4"},
        {**own, "precision": "base", "prefill_precision": "fp4"},
    ]
    (mean,) = (line.split() for line in ran.out.splitlines() if line.split()[:1] == ["mean"])
    assert mean[-3:] == ["100.0±0.0", "%", "0.000±0.000"]
    assert "lower bound" in ran.out


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "t.npy"
    np.save(path, np.arange(200) % 250)
    return path


def refused(*arguments: object) -> str:
    with pytest.raises(MoetError) as caught:
        CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)
    assert caught.value.hint or "must be given" in caught.value.message
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no held-out windows (heldout.json). Give a text with --text FILE"),
        (["--tokens", "TOKENS", "--text", "TOKENS"], "one of --tokens and --text must be given"),
        (["--tokens", "TOKENS", "--window", "300"], "has 200 tokens; a window takes 300"),
        (["--tokens", "TOKENS", "--window", "150"], "takes two windows: 300 tokens"),
        (["--tokens", "TOKENS", "--window", "9", "--count", "9"], "takes two windows: 18 tokens"),
        (["--tokens", "none.bin"], "none.bin: cannot be read as tokens"),
        (["--tokens", "TOKENS", "--engine", "[1]"], "--engine must be a JSON object"),
        (["--tokens", "TOKENS", "--set", "pol=lru"], "unknown setting 'pol'"),
        (["--set", 'gate={"tau": 0.5}'], "--set gate=…: it acts on tokens that are generated"),
        (["--set", "adaptive={}"], "--set adaptive=…: it acts on tokens that are generated"),
        (
            ["--tokens", "TOKENS", "--window", "50", "--precision", "tenth"],
            "precision 'tenth' is neither base nor fp4",
        ),
        (["--tokens", "TOKENS", "--output", "/proc"], "--output /proc cannot be written"),
        (["--tokens", "TOKENS", "--output", "TOKENS/r.json"], "cannot be written"),
    ],
)
def test_what_cannot_work(options: list[str], message: str, checkpoint: Path, tokens: Path) -> None:
    given = [text.replace("TOKENS", str(tokens)) for text in options]
    assert message in refused(checkpoint, *given)


def test_held_out_windows_that_do_not_do(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    ids = np.arange(4 * 30).reshape(2, 2, 30)
    write_heldout(model, HeldOut(("a", "b"), ids), "")
    assert "--window 31: the held-out windows of" in refused(model, "--window", 31)
    assert "takes two windows: 120 tokens in windows of 30, of 2 kinds" in refused(
        model, "--count", 119
    )
    write_heldout(model, HeldOut(("a", "b"), ids + 200), "")
    assert "heldout.bin: has token 319, but the model's vocabulary has 256" in refused(model)


def test_options_of_vllm_that_are_the_commands_own(checkpoint: Path, tokens: Path) -> None:
    pack = make_pack(checkpoint, tokens.with_name("p.moet"))
    options = ["--pack", pack, "--tokens", tokens, "--window", "50"]
    assert "--engine: 'max_logprobs' is the command's own" in refused(
        checkpoint, *options, "--engine", '{"max_logprobs": 5}'
    )
