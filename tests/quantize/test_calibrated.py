"""Levels 1 to 3: right by independent computation, better than what they start from, and safe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import CheckpointError
from moet.quantize import (
    QUANTIZERS,
    DataFreeQuantizer,
    Expert,
    LayerSamples,
    SampleSource,
    TwoBitExpert,
)
from moet.quantize.feedback import best_scale, error_feedback, inverse_factor
from moet.quantize.refine import descend, fit_scales
from moet.quantize.rounding import (
    BlockScale,
    Draft,
    draft_of,
    factor_of,
    levels_of,
    round_scale,
)

HIDDEN, INNER, EXPERTS, TOKENS = 64, 32, 4, 600
LEVELS = ("scales", "gptq", "sequential")
ALLOWED = np.array([0, *range(0x08, 0x6F)], np.uint8)
E4M3 = ALLOWED.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


class Given(SampleSource):
    """One layer's samples; layer 9 has none."""

    digest = "0" * 64

    def __init__(self, samples: LayerSamples) -> None:
        self.samples = samples

    def layer(self, layer: int) -> LayerSamples | None:
        return None if layer == 9 else self.samples


def make_samples(seed: int = 0, experts: int = EXPERTS) -> LayerSamples:
    """Correlated inputs of very unequal size, as a trained model's are."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(HIDDEN, HIDDEN, generator=rng) * torch.logspace(0, -1.5, HIDDEN)[:, None]
    x = (torch.randn(TOKENS, HIDDEN, generator=rng) @ mix).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=rng)[:2] for _ in range(TOKENS)])
    return LayerSamples(x, ids.int(), torch.rand(TOKENS, 2, generator=rng) + 0.1)


def make_expert(seed: int = 1) -> Expert:
    rng = np.random.default_rng(seed)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    return Expert(*(rng.standard_normal(s).astype(np.float32) * s[1] ** -0.5 for s in shapes))


def output(matrices: tuple[np.ndarray, ...], x: np.ndarray) -> np.ndarray:
    gate, up, down = (m.astype(np.float64) for m in matrices)
    inner = x @ gate.T
    inner = inner / (1 + np.exp(-inner)) * (x @ up.T)
    return inner @ down.T


def values(base: TwoBitExpert) -> tuple[np.ndarray, ...]:
    return tuple(matrix.decode() for matrix in base)


def relative_error(base: TwoBitExpert, weights: Expert, x: np.ndarray, q: np.ndarray) -> float:
    """Of the base's outputs on q as a stand-in for the weights' outputs on x."""
    exact = output(tuple(weights), x)
    return float(np.square(output(values(base), q) - exact).sum() / np.square(exact).sum())


def check_form(base: TwoBitExpert) -> None:
    for matrix in base:
        assert matrix.codes.dtype == matrix.scales.dtype == np.uint8
        assert matrix.codes.max() <= 3
        assert np.isin(matrix.scales, ALLOWED).all()
        assert np.isfinite(matrix.factor)
        assert matrix.factor > 0
        zero = (matrix.scales == 0).repeat(32, 1)
        assert not matrix.codes[zero].any()


def test_each_level_lowers_the_output_error_on_other_tokens() -> None:
    samples, weights = make_samples(), make_expert()
    other = make_samples()  # the same distribution: the mix comes from the seed
    rng = torch.Generator().manual_seed(7)
    mixed = torch.randn(TOKENS, TOKENS, generator=rng) / TOKENS**0.5
    x = (mixed @ other.x.float()).double().numpy()
    errors = []
    for name in ("data-free", *LEVELS[:2]):
        made = QUANTIZERS[name]() if name == "data-free" else QUANTIZERS[name](Given(samples))
        base = made.quantize_expert(weights, 3, 0)
        check_form(base)
        errors.append(relative_error(base, weights, x, x))
    assert errors[1] < 0.97 * errors[0]
    assert errors[2] < 0.75 * errors[1]


def test_level_3_makes_up_for_the_error_of_earlier_layers() -> None:
    samples, weights = make_samples(), make_expert()
    rng = torch.Generator().manual_seed(3)
    turn = torch.eye(HIDDEN) + 0.1 * torch.randn(HIDDEN, HIDDEN, generator=rng)
    q = (samples.x.float() @ turn).bfloat16()
    paired = LayerSamples(samples.x, samples.ids, samples.weights, quantized=q)
    token, _ = samples.of(0)
    x, q0 = (part[token].double().numpy() for part in (samples.x, q))
    alone = QUANTIZERS["gptq"](Given(samples)).quantize_expert(weights, 3, 0)
    together = QUANTIZERS["sequential"](Given(paired)).quantize_expert(weights, 3, 0)
    check_form(together)
    gain = relative_error(together, weights, x, q0) / relative_error(alone, weights, x, q0)
    assert gain < 0.75


def hessian(seed: int = 0) -> torch.Tensor:
    x = make_samples(seed).x.float()
    moment = x.T @ x / TOKENS
    return moment + 0.01 * moment.diagonal().mean() * torch.eye(HIDDEN)


def start(seed: int = 1) -> tuple[Draft, torch.Tensor]:
    weight = make_expert(seed).gate
    base = DataFreeQuantizer().quantize_expert(make_expert(seed), 0, 0).gate
    return draft_of([base], torch.device("cpu")), torch.from_numpy(weight)


def cost(draft: Draft, target: torch.Tensor, h: torch.Tensor) -> np.ndarray:
    error = (draft.values() - target).double()
    return ((error @ h.double()) * error).sum(1).numpy()


def test_scales_are_the_least_squares_solution() -> None:
    draft, target = start()
    h = hessian()
    root = torch.linalg.cholesky(h.double()).numpy().T
    fitted = fit_scales(draft, target, h)
    for row in range(4):
        levels = draft.levels[row].double().numpy().reshape(-1, 32)
        columns = np.stack([root[:, 32 * b : 32 * b + 32] @ levels[b] for b in range(len(levels))])
        exact = np.linalg.lstsq(columns.T, root @ target[row].double().numpy(), rcond=None)[0]
        factor = float(draft.factor[0, 0])
        for ours, best in zip(fitted.scale[row].double().numpy(), np.abs(exact), strict=True):
            near = E4M3[np.abs(E4M3 * factor - best).argmin()] * factor
            # The ridge moves a solution a little; at a middle it may fall to either side.
            assert abs(ours - near) <= 0.13 * near + 1e-9
    assert cost(fitted, target, h).sum() < cost(draft, target, h).sum()


def test_a_negative_solution_turns_the_signs_of_its_block() -> None:
    draft, target = start()
    wrong = Draft(-draft.levels, draft.scale, draft.factor)
    fitted = fit_scales(wrong, target, hessian())
    assert (fitted.scale >= 0).all()
    assert (
        cost(fitted, target, hessian()).sum()
        <= 1.05 * cost(fit_scales(draft, target, hessian()), target, hessian()).sum()
    )


def test_error_feedback_is_gptq() -> None:
    """Against the textbook form: after each column, the open ones are solved for exactly."""
    weight = torch.from_numpy(make_expert().gate)[:3]
    h = hessian()
    draft = error_feedback(weight, inverse_factor(h), factor_of(weight))
    exact = h.double().numpy()
    for row in range(len(weight)):
        w = weight[row].double().numpy().copy()
        for k in range(HIDDEN):
            s = float(draft.scale[row, k // 32])
            if abs(abs(w[k]) - 2.5 * s) > 1e-4 * s and abs(w[k]) > 1e-4 * s:
                level = np.sign(w[k]) * (4 if abs(w[k]) > 2.5 * s else 1)
                assert float(draft.levels[row, k]) == level
            error = w[k] - float(draft.levels[row, k]) * s
            rest = slice(k + 1, None)
            if k + 1 < HIDDEN:
                w[rest] += np.linalg.solve(exact[rest, rest], exact[rest, k]) * error


def test_the_best_scale_is_the_best_of_all() -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((40, 32))
    price = rng.uniform(0.5, 2, 32)
    factor = float(np.abs(weight).max() / 128)
    found = best_scale(
        torch.tensor(weight, dtype=torch.float32),
        torch.tensor(price, dtype=torch.float32),
        torch.full((40, 1), factor),
    )
    for row in range(40):
        s = E4M3[:, None] * factor
        size = np.abs(weight[row])
        errors = (np.minimum(np.abs(size - s), np.abs(size - 4 * s)) ** 2 * price).sum(1)
        at = np.abs(E4M3 * factor - float(found[row, 0])).argmin()
        assert errors[at] <= errors.min() * (1 + 1e-5)


def test_descent_ends_where_no_single_code_can_be_better() -> None:
    draft, target = start()
    h = hessian()
    before = cost(draft, target, h)
    for _ in range(20):
        after = descend(draft, target, h)
        now = cost(after, target, h)
        assert (now <= before * (1 + 1e-5) + 1e-12).all()
        if torch.equal(after.levels, draft.levels):
            break
        draft, before = after, now
    for k in range(0, HIDDEN, 7):
        for level in (-4.0, -1.0, 1.0, 4.0):
            other = Draft(draft.levels.clone(), draft.scale, draft.factor)
            other.levels[:, k] = level
            assert (cost(other, target, h) >= before * (1 - 1e-4) - 1e-12).all()


@given(st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_any_size_of_weights_gives_allowed_bytes(size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = make_expert(seed % 1000)
    weights.gate[rng.random(weights.gate.shape) < 0.3] = 0
    weights.up[:, :32] = 0
    weights.down[::3] *= np.float32(1e-6)
    scaled = Expert(*(np.clip(w * size, -3e38, 3e38).astype(np.float32) for w in weights))
    for name in LEVELS:
        check_form(QUANTIZERS[name](Given(SAMPLES)).quantize_expert(scaled, 3, 1))


SAMPLES = make_samples()


@pytest.mark.parametrize("name", LEVELS)
def test_an_expert_without_tokens_is_made_from_its_layer(name: str) -> None:
    quantizer = QUANTIZERS[name](Given(SAMPLES))
    weights = make_expert()
    base = quantizer.quantize_expert(weights, 3, EXPERTS + 1)
    check_form(base)
    assert quantizer.bases == {"layer": 3}
    x = SAMPLES.x.double().numpy()
    plain = DataFreeQuantizer().quantize_expert(weights, 3, 0)
    assert relative_error(base, weights, x, x) < 0.97 * relative_error(plain, weights, x, x)


def broken(what: str) -> SampleSource:
    x, ids, weights = SAMPLES.x.clone(), SAMPLES.ids, SAMPLES.weights
    if what == "nan":
        x[5, 3] = float("nan")
    elif what == "infinite":
        x[:, 1] = float("inf")
    elif what == "zero":
        x = torch.zeros_like(x)
    elif what == "no tokens":
        x, ids, weights = x[:0], ids[:0], weights[:0]
    return Given(LayerSamples(x, ids, weights))


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("what", ["nan", "infinite", "zero", "no tokens", "other layer"])
def test_what_says_nothing_leaves_level_0(name: str, what: str) -> None:
    quantizer = QUANTIZERS[name](broken(what))
    weights = make_expert()
    layer = 9 if what == "other layer" else 3
    base = quantizer.quantize_expert(weights, layer, 0)
    plain = DataFreeQuantizer().quantize_expert(weights, layer, 0)
    for ours, level_0 in zip(base, plain, strict=True):
        assert np.array_equal(ours.codes, level_0.codes)
        assert np.array_equal(ours.scales, level_0.scales)
        assert ours.factor == level_0.factor
    assert quantizer.bases == {"level 0": 3}


@pytest.mark.parametrize("name", LEVELS)
def test_inputs_on_one_line_are_enough(name: str) -> None:
    """A Hessian of rank one: damping alone makes it invertible."""
    x = (torch.linspace(-1, 1, TOKENS)[:, None] * torch.ones(HIDDEN)).bfloat16()
    quantizer = QUANTIZERS[name](Given(LayerSamples(x, SAMPLES.ids, SAMPLES.weights)))
    weights = make_expert()
    check_form(quantizer.quantize_expert(weights, 3, 0))
    assert quantizer.bases == {"expert": 3}


@pytest.mark.parametrize("name", LEVELS)
def test_zeros_on_dead_inputs_lean_to_no_side(name: str) -> None:
    weights = make_expert()
    weights.gate[:, 1::2] = 0
    x = SAMPLES.x.clone()
    x[:, 1::2] = 0  # so nothing is fed back to them
    base = QUANTIZERS[name](Given(LayerSamples(x, SAMPLES.ids, SAMPLES.weights)))
    gate = base.quantize_expert(weights, 3, 0).gate
    minus = (gate.codes[:, 1::2] >= 2).mean()
    assert 0.4 < minus < 0.6


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_weight_that_is_not_finite_is_refused(projection: str) -> None:
    weights = make_expert()
    getattr(weights, projection)[2, 3] = np.inf
    with pytest.raises(CheckpointError, match=f"layer 3, expert 1, {projection} has a weight"):
        QUANTIZERS["gptq"](Given(SAMPLES)).quantize_expert(weights, 3, 1)


def test_threads_get_the_same_bytes() -> None:
    quantizer = QUANTIZERS["gptq"](Given(SAMPLES))
    experts = [make_expert(seed) for seed in range(8)]
    alone = [quantizer.quantize_expert(e, 3, i % EXPERTS) for i, e in enumerate(experts)]
    with ThreadPoolExecutor(4) as pool:
        again = pool.map(lambda i: quantizer.quantize_expert(experts[i], 3, i % EXPERTS), range(8))
        for one, two in zip(alone, again, strict=True):
            for a, b in zip(one, two, strict=True):
                assert np.array_equal(a.codes, b.codes)
                assert np.array_equal(a.scales, b.scales)


def test_the_activation_reaches_the_down_projection() -> None:
    """A clamp that cuts nearly everything changes what the down projection sees, so its base."""
    weights = make_expert()

    def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate.clamp(max=0.01)) * up.clamp(-0.01, 0.01)

    free, cut = (
        QUANTIZERS["gptq"](Given(SAMPLES), activation=activation).quantize_expert(weights, 3, 0)
        for activation in (None, clamped)
    )
    assert np.array_equal(free.gate.codes, cut.gate.codes)
    assert not np.array_equal(free.down.codes, cut.down.codes)


def test_rounding_of_scales_is_to_the_nearest_allowed() -> None:
    rng = np.random.default_rng(0)
    scale = np.concatenate([10 ** rng.uniform(-4, 3, 500), E4M3, [0.0]])
    found = round_scale(torch.tensor(scale, dtype=torch.float32)[:, None], torch.ones(1, 1))
    nearest = np.abs(scale[:, None] - E4M3).min(1)
    assert np.allclose(np.abs(found[:, 0].double().numpy() - scale), nearest, rtol=1e-5, atol=1e-7)


def test_nearest_levels() -> None:
    weight = torch.tensor([0.0, 2.4, 2.6, -2.4, -2.6, -0.1, 9.0, -1.0])
    values, scale = torch.empty(8), torch.full((8,), 2.0)
    BlockScale.of(scale).nearest(2 * weight, out=values)
    assert values.tolist() == [2, 2, 8, -2, -8, -2, 8, -2]
    assert levels_of(values[:, None], scale[:, None])[:, 0].tolist() == [1, 1, 4, -1, -4, -1, 4, -1]
