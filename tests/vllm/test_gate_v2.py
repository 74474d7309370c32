"""The gate in vLLM's second runner, whose control flow alone can run here: a toy runner that calls
the methods in the order of `v1/worker/gpu/model_runner.py`. tests/gpu/test_gate.py has the real
one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context

from moet.errors import UnsupportedError
from moet.vllm.gate.gate import Gate
from moet.vllm.gate.v2 import GateV2
from moet.vllm.phase import fp4_tokens

HIDDEN, VOCABULARY = 4, 6


class Toy(nn.Module):
    """A model that adds 1 to what runs at FP4, and notes down what it is given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, input_ids, positions, inputs_embeds, intermediate_tensors):
        context = get_forward_context()
        marks = fp4_tokens(context)
        high = torch.full((len(input_ids),), float(self.experts.fp4))
        if marks is not None:
            high[: len(marks.tokens)] = torch.from_numpy(marks.tokens).float()
        self.calls.append(
            (input_ids.tolist(), marks and marks.again, context.cudagraph_runtime_mode)
        )
        return (input_ids.float() + high)[:, None].repeat(1, HIDDEN)

    def compute_logits(self, hidden):
        """Sure of token 0 where the input was even; in doubt otherwise. Token 1 tells FP4."""
        logits = torch.zeros(len(hidden), VOCABULARY)
        value = hidden[:, 0]
        logits[:, 0] = torch.where(value % 2 == 0, 9.0, 0.5)
        logits[:, 1] = torch.where(value > 101, 20.0, 0.0)
        return logits


class Runner:
    """The part of vLLM's runner that the gate is put around."""

    def __init__(self):
        self.vllm_config, self.device = VllmConfig(), torch.device("cpu")
        self.model = Toy()
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        self.attn_groups = []
        self.req_states = SimpleNamespace(
            prompt_len=SimpleNamespace(np=np.array([1, 3, 8])), num_computed_tokens_np=None
        )
        self.model_state = SimpleNamespace(prepare_inputs=lambda batch, states: {})
        self.cudagraph_manager = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        self.uses_inputs_embeds, self.batch_sharder = False, None
        self.execute_model_state = None

    def initialize_kv_cache(self, config):
        pass

    def gather_batch_req_state(self, scheduler_output, dummy_run):
        batch = scheduler_output.batch
        self.req_states.num_computed_tokens_np = batch.num_computed_tokens_np
        return batch, 1 if (batch.num_scheduled_tokens == 1).all() else None

    def prepare_attn(self, input_batch):
        return (), torch.zeros(0, input_batch.num_tokens, dtype=torch.int64)

    def execute_model(self, scheduler_output):
        batch, length = self.gather_batch_req_state(scheduler_output, False)
        desc = SimpleNamespace(cg_mode=scheduler_output.mode)
        if desc.cg_mode == CUDAGraphMode.FULL and length is None:
            desc.cg_mode = CUDAGraphMode.PIECEWISE
        self.prepare_attn(batch)
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        if desc.cg_mode == CUDAGraphMode.FULL:
            hidden = batch.input_ids.float()[:, None].repeat(1, HIDDEN)  # a replay
        else:
            run = getattr(self.cudagraph_manager, "run_pw_graph", lambda m, i: m(**i))
            with set_forward_context(
                {}, self.vllm_config, cudagraph_runtime_mode=desc.cg_mode, num_tokens=9
            ):
                hidden = run(self.model, inputs)
        self.execute_model_state = SimpleNamespace(
            attn_metadata={}, slot_mappings_by_layer={}, hidden=hidden, batch=batch
        )

    def sample_tokens(self, grammar_output):
        state, self.execute_model_state = self.execute_model_state, None
        return self.sample(state.hidden, state.batch, grammar_output), state.hidden

    def sample(self, hidden_states, input_batch, grammar_output):
        return self.model.compute_logits(hidden_states[input_batch.logits_indices])


class GatedRunner(GateV2, Runner):
    pass


class Experts:
    """What the gate asks of a rank's runtime."""

    fp4 = False

    def all_at_fp4(self, on):
        self.fp4 = on
        return True


def runner(gate, prompts_fp4=False):
    made = GatedRunner()
    made.moet_runtime = made.model.experts = Experts()
    made.moet_attach()
    made.moet_gate, made.moet_prompts_fp4 = gate, prompts_fp4
    return made


def batch(ids, lengths, computed, prefill):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([c + np.arange(n) for c, n in zip(computed, lengths, strict=True)])
    return SimpleNamespace(
        req_ids=["a", "b", "c"][: len(lengths)],
        num_tokens=len(ids),
        num_tokens_after_padding=len(ids),
        num_computed_tokens_np=np.array(computed),
        num_scheduled_tokens=np.array(lengths),
        prefill_len_np=np.array(prefill),
        idx_mapping_np=np.arange(len(lengths)),
        seq_lens=torch.tensor(np.array(computed) + lengths),
        seq_lens_cpu_upper_bound=torch.tensor(np.array(computed) + lengths),
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        is_padding=None,
        logits_indices=torch.tensor(starts[1:] - 1),
    )


def step(made, of, mode=CUDAGraphMode.NONE):
    made.execute_model(SimpleNamespace(finished_req_ids=set(), batch=of, mode=mode))
    return made.sample_tokens(None)


# Two requests that decode 101 and 8, and the last but one piece of a prompt of 8.
MIXED = ([101, 8, 21, 23, 25], [1, 1, 3], [5, 6, 2], [1, 3, 8])


def test_only_the_doubtful_token_is_decided_again():
    made = runner(Gate(0.5))
    logits, hidden = step(made, batch(*MIXED))
    assert [ids for ids, *_ in made.model.calls] == [[101, 8, 21, 23, 25], [101]]
    assert made.model.calls[1][1:] == (True, CUDAGraphMode.NONE)
    assert hidden[:, 0].tolist() == [102, 8, 21, 23, 25]
    assert logits.argmax(-1).tolist()[:2] == [1, 0]
    assert logits[0].tolist() == [9.0, 20.0, 0, 0, 0, 0]  # of the second pass
    assert (made.moet_gate.tokens, made.moet_gate.fired) == (2, 1)


def test_off_and_always():
    made = runner(Gate(0.0))
    step(made, batch(*MIXED))
    assert len(made.model.calls) == 1
    made.moet_gate.set(1.0, 1.0)
    _, hidden = step(made, batch(*MIXED))
    assert hidden[:, 0].tolist() == [102, 9, 22, 24, 26]
    assert len(made.model.calls) == 2  # the first pass is at FP4
    assert (made.moet_gate.tokens, made.moet_gate.fired) == (2, 2)
    assert made.moet_gate.gated_steps == 0
    made.moet_gate.set(0.0, 1.0)
    _, hidden = step(made, batch(*MIXED))
    assert hidden[:, 0].tolist() == [101, 8, 21, 23, 25]


def test_prompts_at_fp4_run_without_graphs():
    made = runner(None, prompts_fp4=True)
    _, hidden = step(made, batch(*MIXED), CUDAGraphMode.PIECEWISE)
    assert hidden[:, 0].tolist() == [101, 8, 22, 24, 26]
    ((_, again, mode),) = made.model.calls
    assert (again, mode) == (False, CUDAGraphMode.NONE)
    assert list(vars(made.cudagraph_manager)) == ["cudagraph_mode"]
    # A decode step with a prompt's last token is no graph of the whole step.
    one = batch([101, 8, 27], [1, 1, 1], [5, 6, 7], [1, 3, 8])
    _, hidden = step(made, one, CUDAGraphMode.FULL)
    assert hidden[:, 0].tolist() == [101, 8, 28]
    assert made.model.calls[1:] == [([101, 8, 27], False, CUDAGraphMode.NONE)]


def test_what_fired_before_a_preemption_runs_at_fp4_again():
    made = runner(Gate(0.5))
    step(made, batch([101, 8], [1, 1], [5, 6], [1, 3]), CUDAGraphMode.FULL)
    assert made.moet_gate.fired == 1
    # Positions 4 to 6 of the first request are computed again; 5 had fired.
    _, hidden = step(made, batch([90, 101, 92, 8], [3, 1], [4, 7], [8, 3]))
    assert hidden[:, 0].tolist() == [90, 102, 92, 8]
    assert made.moet_gate.fired == 1


def test_prompts_as_one_graph_are_refused():
    made = runner(None, prompts_fp4=True)
    made.initialize_kv_cache(None)
    made.cudagraph_manager.cudagraph_mode = CUDAGraphMode.FULL
    with pytest.raises(UnsupportedError, match="one CUDA graph"):
        made.initialize_kv_cache(None)
