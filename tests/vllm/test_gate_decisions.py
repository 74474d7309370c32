"""Which tokens fire: by their own request alone, within the cap, and again after a preemption."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.vllm.gate.gate import Gate, known_at_fp4, most_likely

TAUS = st.sampled_from([0.0, 0.3, 0.7, 1.0])
CONFIDENCES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12)


def decide(gate, name, position, value, first=4):
    (fires,) = gate.decide(
        [name], np.array([position]), np.array([first]), np.array([value], np.float32)
    )
    return bool(fires)


@settings(max_examples=60, deadline=None)
@given(
    tau=TAUS,
    cap=st.sampled_from([0.0, 0.25, 0.6, 1.0]),
    requests=st.dictionaries(st.sampled_from("abcd"), CONFIDENCES, min_size=1),
    order=st.randoms(),
)
def test_each_request_is_decided_as_if_it_were_alone(tau, cap, requests, order):
    alone = {
        name: [decide(gate, name, 4 + i, value) for i, value in enumerate(values)]
        for name, values in requests.items()
        for gate in (Gate(tau, cap),)
    }
    for name, values in requests.items():
        for i, fires in enumerate(alone[name]):
            doubtful = values[i] < tau or tau >= 1
            assert not fires or doubtful
            assert sum(alone[name][: i + 1]) <= cap * (i + 1)
        if cap == 1:
            assert alone[name] == [value < tau or tau >= 1 for value in values]
    gate = Gate(tau, cap)
    together = {name: [] for name in requests}
    left = {name: list(values) for name, values in requests.items()}
    while left:  # steps of requests at different positions
        names = order.sample(sorted(left), order.randint(1, len(left)))
        fires = gate.decide(
            names,
            np.array([4 + len(together[name]) for name in names]),
            np.full(len(names), 4),
            np.array([left[name].pop(0) for name in names], np.float32),
        )
        for name, fired in zip(names, fires.tolist(), strict=True):
            together[name].append(fired)
        left = {name: values for name, values in left.items() if values}
    assert together == alone
    assert gate.fired == sum(map(sum, alone.values()))
    assert gate.tokens == sum(map(len, requests.values()))


def test_what_fired_is_known_until_the_request_ends():
    gate = Gate(0.5)
    fired = [decide(gate, "a", 4 + i, value) for i, value in enumerate([0.1, 0.9, 0.2, 0.8])]
    assert fired == [True, False, True, False]
    # Asked again, since vLLM dropped the step's output: it does not count twice.
    assert decide(gate, "a", 8, 0.1)
    assert decide(gate, "a", 8, 0.1)
    assert gate.decided_again("a", 0, 100) == [4, 6, 8]

    def marks(computed, length, prompts_fp4=False, piece=False):
        found = known_at_fp4(
            ["b", "a"],
            np.array([30, computed]),
            np.array([1, length]),
            np.array([10, 5]),
            np.array([False, piece]),
            gate,
            prompts_fp4,
        )
        return None if found is None else found.nonzero()[0].tolist()

    assert marks(0, 10) == [1 + 4, 1 + 6, 1 + 8]  # resumed from the start
    assert marks(5, 3) == [1 + 1]
    assert marks(6, 1, piece=True) == [1]
    assert marks(8, 1) is None  # is decided by its logits
    assert marks(0, 10, prompts_fp4=True) == [1, 2, 3, 4, 5, 7, 9]
    gate.forget(["a"])
    assert marks(0, 10) is None


def test_most_likely():
    logits = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, float(np.log(3))]])
    confidence, successors = most_likely(logits)
    assert confidence == pytest.approx([0.5, 1.0, 0.75])
    assert successors.tolist()[1:] == [0, 1]
    assert most_likely(logits.bfloat16())[0].dtype == np.float32


def test_flips_and_seconds_add_up():
    gate = Gate(0.5)
    gate.count_flips(torch.tensor([3, 4, 5]), torch.tensor([3, 1, 2]))
    gate.count_flips(torch.tensor([7]), torch.tensor([8]))
    with gate.stopwatch.timed(torch.device("cpu")):
        pass
    figures = {figure.name: figure.value for figure in gate.figures()}
    assert figures["gate_flipped"] == 3
    assert figures["gate_seconds"] > 0
