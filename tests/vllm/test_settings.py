"""Settings: every mistake names its key and what to change."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from moet.errors import ConfigError
from moet.settings import Settings, default_pack_path
from moet.vllm import build, gpu_build


def test_defaults_and_plain_values():
    assert Settings.from_additional_config({}) == Settings()
    settings = Settings.from_additional_config(
        {"moet": {"base_pool": 512, "precision": "fp4", "heat_file": "/x/heat"}, "other": 1}
    )
    assert settings.base_pool == "512"
    assert settings.heat_file == Path("/x/heat")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_pol": "25%"}, "unknown setting 'base_pol'. Did you mean 'base_pool'?"),
        ({"frobnicate": 1}, "The settings are: pack, precision,"),
        ({"base_pool": "some"}, "base_pool 'some' is not a size"),
        ({"fp4_pool": "120%"}, "fp4_pool '120%' is more than all rows"),
        ({"arena": "64 GB RAM"}, "arena '64 GB RAM' is not a size"),
        ({"prefill_staging": "sometimes"}, "setting 'prefill_staging' cannot be 'sometimes'"),
        ({"fp8_activations": "e5m2"}, "setting 'fp8_activations' cannot be 'e5m2'"),
        ({"policy": "mru"}, "unknown policy 'mru'. Choose one of: lfu, lru, static."),
        ({"operator": "cudaa"}, "unknown experts operator 'cudaa'"),
        ({"verify": "never"}, "setting 'verify' cannot be 'never'"),
        ({"io_threads": 0}, "setting 'io_threads' cannot be 0: "),
        ({"direct_io": "perhaps"}, "setting 'direct_io' cannot be 'perhaps'"),
        (["base_pool"], "must be a mapping of names to values"),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(values, message):
    with pytest.raises(ConfigError) as caught:
        Settings.from_additional_config({"moet": values})
    assert message in str(caught.value)


def test_policy_and_streaming_have_a_default_for_each_platform():
    settings = Settings()
    assert (settings.pool_policy, settings.pool_streaming) == ("lru", 8)
    tiers = settings.tier_options(layer_rows=48)
    assert (tiers.policy, tiers.streaming, tiers.io_threads) == ("lfu", None, 4)
    assert tiers.layer_rows == 48
    settings = Settings.parse({"policy": "static", "streaming_slots": 3, "io_threads": 9})
    assert (settings.pool_policy, settings.pool_streaming) == ("static", 3)
    tiers = settings.tier_options()
    assert (tiers.policy, tiers.streaming, tiers.io_threads) == ("static", 3, 9)


def test_settings_that_a_platform_ignores():
    described = {
        word: [n for n, f in Settings.model_fields.items() if f.description.startswith(word)]
        for word in ("GPU only", "CPU only")
    }
    given = {
        "arena": "1GiB", "prefill_staging": False, "fp8_activations": True,
        "routing_trace": "/x/trace", "threads": 2,
    }  # fmt: skip
    settings = Settings.parse({**given, "io_threads": 2})
    assert settings.ignored(gpu=False) == described["GPU only"]
    assert settings.ignored(gpu=True) == [*described["CPU only"], "threads"]
    for gpu in (False, True):
        assert Settings.parse({"arena": "auto"}).ignored(gpu=gpu) == []


@pytest.mark.parametrize("gpu", [False, True])
def test_an_ignored_setting_is_named_in_the_log_of_one_rank(gpu, monkeypatch):
    warned = []
    monkeypatch.setattr(build.logger, "warning", lambda text, *args: warned.append(text % args))
    monkeypatch.setattr(build.current_platform, "is_cuda", lambda: gpu, raising=False)
    monkeypatch.setattr(build, "open_rows", lambda *_: None)
    monkeypatch.setattr(build, "_build", lambda *_: "built")
    monkeypatch.setattr(gpu_build, "build_gpu_runtime", lambda *_: "built")
    values = {"fp8_activations": True, "threads": 2, "direct_io": True}
    config = SimpleNamespace(additional_config={"moet": values})
    for rank in (0, 1):
        assert build.build_runtime(config, [0], rank, 2) == "built"
    assert len(warned) == 1
    assert ("setting threads" if gpu else "setting fp8_activations") in warned[0]


def test_settings_cannot_change():
    with pytest.raises(ValueError, match="frozen"):
        Settings().policy = "lfu"


def test_default_pack_path_is_one_safe_name_below_the_cache():
    path = default_pack_path("nvidia/DeepSeek R1:FP4", "0123456789abcdef")
    assert path.parent == Path.home() / ".cache" / "moet" / "packs"
    assert path.name == "DeepSeek-R1-FP4-0123456789ab"
