"""The gate in vLLM's second runner, whose control flow alone can run here: a toy runner that calls
the methods in the order of `v1/worker/gpu/model_runner.py`, and toy CUDA graphs that note down a
model's call and make it again. tests/gpu/test_gate.py has the real ones."""

from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import (
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from moet.errors import UnsupportedError
from moet.vllm.gate.gate import Gate
from moet.vllm.gate.v2 import GateV2
from moet.vllm.phase import fp4_tokens

HIDDEN, VOCABULARY = 4, 6


SEQUENCES = 5  # at once
PADDING = -1  # slot of a token that writes no KV


class Toy(nn.Module):
    """A model that adds 1 to what runs at FP4, and notes down what it is given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, input_ids, positions, inputs_embeds=None, intermediate_tensors=None):
        context = get_forward_context()
        if Graph.recording is not None:
            Graph.recording.call = self, context, input_ids, positions
        marks = fp4_tokens(context)
        high = torch.full((len(input_ids),), float(self.experts.fp4))
        if marks is not None:
            high[: len(marks.tokens)] = torch.from_numpy(marks.tokens).float()
        self.calls.append(
            (input_ids.tolist(), marks and marks.again, context.cudagraph_runtime_mode)
        )
        return (input_ids.float() + high)[:, None].repeat(1, HIDDEN)

    def compute_logits(self, hidden):
        """Sure of token 0 where the input was even; in doubt otherwise. The last ones tell FP4."""
        logits = torch.zeros(len(hidden), VOCABULARY)
        value = hidden[:, 0]
        logits[:, 0] = torch.where(value % 2 == 0, 9.0, 0.5)
        logits[:, 1] = torch.where(value > 101, 20.0, 0.0)
        logits[:, -1] = -value
        return logits


class Graph:
    """Of a capture, the model's one call, which replays make again."""

    recording: ClassVar["Graph | None"] = None

    @torch.inference_mode()
    def replay(self):
        model, context, *inputs = self.call
        with override_forward_context(context):
            hidden = model(*inputs)
        self.manager.hidden_states[: len(hidden)] = hidden


class Tables:
    """vLLM's block tables of one cache: a request's tokens lie in its blocks of two, in a row."""

    cp_size = 1

    def __init__(self):
        self.blocks = torch.arange(100 * SEQUENCES).view(SEQUENCES, 100)
        self.input_block_tables = [torch.zeros(SEQUENCES, 100, dtype=torch.int64)]
        self.slot_mappings = torch.zeros(1, 64, dtype=torch.int64)

    def gather_block_tables(self, idx_mapping, num_reqs_padded):
        (table,) = self.input_block_tables
        table[:num_reqs_padded] = 0
        table[: len(idx_mapping)] = self.blocks[idx_mapping]
        return (table[:num_reqs_padded],)

    def compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded):
        self.slot_mappings.fill_(PADDING)
        for index, request in enumerate(idx_mapping.tolist()):
            for at in range(int(query_start_loc[index]), int(query_start_loc[index + 1])):
                position = int(positions[at])
                block = self.blocks[request, position // 2]
                self.slot_mappings[0, at] = 2 * block + position % 2
        return self.slot_mappings[:, :num_tokens_padded]

    def get_dummy_block_tables(self, num_reqs):
        return (self.input_block_tables[0][:num_reqs].zero_(),)

    def get_dummy_slot_mappings(self, num_tokens):
        return self.slot_mappings.fill_(PADDING)[:, :num_tokens]


class State:
    """The model's, of vLLM's runner: notes down what the second pass attends to."""

    def __init__(self):
        self.seen = []

    def prepare_dummy_inputs(self, num_reqs, num_tokens):
        return {}

    def prepare_inputs(self, batch, req_states):
        return {}

    def prepare_attn(self, batch, mode, tables, slots, groups, config, for_capture=False):
        self.seen.append(
            {
                "mode": mode,
                "starts": batch.query_start_loc.tolist(),
                "lengths": batch.seq_lens.tolist(),
                "most": batch.seq_lens_cpu_upper_bound.tolist(),
                "first block": tables[0][:, 0].tolist(),
                "slots": slots[0].tolist(),
            }
        )
        assert batch.query_start_loc_np.tolist() == self.seen[-1]["starts"]
        assert batch.idx_mapping.tolist() == batch.idx_mapping_np.tolist()
        return {}


class Runner:
    """The part of vLLM's runner that the gate is put around."""

    def __init__(self):
        self.vllm_config, self.device = VllmConfig(), torch.device("cpu")
        self.vllm_config.scheduler_config.max_num_seqs = self.max_num_reqs = SEQUENCES
        sizes = [1, 2, 3, 4, 64]
        self.vllm_config.compilation_config.cudagraph_capture_sizes = sizes
        self.vllm_config.compilation_config.max_cudagraph_capture_size = 64
        self.model = Toy()
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        self.attn_groups = []
        self.block_tables = Tables()
        self.input_buffers = InputBuffers(SEQUENCES, 64, self.device)
        self.req_states = SimpleNamespace(
            prompt_len=SimpleNamespace(np=np.array([1, 3, 8, 2, 4])), num_computed_tokens_np=None
        )
        self.model_state = State()
        self.cudagraph_manager = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, hidden_states=torch.zeros(64, HIDDEN)
        )
        self.uses_inputs_embeds, self.batch_sharder = False, None
        self.execute_model_state = None

    def initialize_kv_cache(self, config):
        pass

    def capture_model(self, *, profile_only=False):
        return 1000

    def gather_batch_req_state(self, scheduler_output, dummy_run):
        batch = scheduler_output.batch
        self.req_states.num_computed_tokens_np = batch.num_computed_tokens_np
        return batch, 1 if (batch.num_scheduled_tokens == 1).all() else None

    def execute_model(self, scheduler_output):
        batch, length = self.gather_batch_req_state(scheduler_output, False)
        desc = SimpleNamespace(cg_mode=scheduler_output.mode)
        if desc.cg_mode == CUDAGraphMode.FULL and length is None:
            desc.cg_mode = CUDAGraphMode.PIECEWISE
        buffers, lengths = self.input_buffers, torch.tensor(batch.num_scheduled_tokens)
        for into, of in (
            (buffers.input_ids, batch.input_ids),
            (buffers.positions, batch.positions),
            (buffers.seq_lens, batch.seq_lens),
            (buffers.query_start_loc[1:], lengths.cumsum(0)),
        ):
            into[: len(of)] = of
        self.block_tables.gather_block_tables(batch.idx_mapping, batch.num_reqs)
        self.block_tables.compute_slot_mappings(
            batch.idx_mapping, buffers.query_start_loc, batch.positions, batch.num_tokens
        )
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        if desc.cg_mode == CUDAGraphMode.FULL:  # a replay
            hidden = self.cudagraph_manager.hidden_states[: batch.num_tokens]
            hidden.copy_(batch.input_ids.float()[:, None].repeat(1, HIDDEN))
        else:
            run = getattr(self.cudagraph_manager, "run_pw_graph", lambda m, i: m(**i))
            with set_forward_context(
                {}, self.vllm_config, cudagraph_runtime_mode=desc.cg_mode, num_tokens=9
            ):
                hidden = run(self.model, inputs)
        self.left = hidden
        self.execute_model_state = ExecuteModelState(hidden, batch)

    def sample_tokens(self, grammar_output):
        state, self.execute_model_state = self.execute_model_state, None
        logits = self.sample(state.hidden_states, state.batch, grammar_output)
        return logits, state.hidden_states

    def sample(self, hidden_states, input_batch, grammar_output):
        return self.model.compute_logits(hidden_states[input_batch.logits_indices])


class ExecuteModelState(NamedTuple):
    hidden_states: torch.Tensor
    batch: InputBatch


class GatedRunner(GateV2, Runner):
    pass


class Experts:
    """What the gate asks of a rank's runtime."""

    fp4 = False

    def all_at_fp4(self, on):
        self.fp4 = on
        return True


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """What vLLM's graphs need of a GPU and of other ranks."""
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    for name, value in {
        "get_pp_group": lambda: alone,
        "is_global_first_rank": lambda: False,
        "current_platform": SimpleNamespace(get_global_graph_pool=lambda: None),
        "current_stream": lambda: None,
        "graph_capture": lambda device: nullcontext(),
        "capture_pool": lambda pool, config: nullcontext(pool),
    }.items():
        monkeypatch.setattr(cudagraph_utils, name, value)

    @contextmanager
    def capturing(graph, pool, stream=None):
        Graph.recording = graph
        yield
        Graph.recording = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    free = iter(range(10**6, 0, -7))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free), 10**6))


def runner(gate, prompts_fp4=False):
    made = GatedRunner()
    made.moet_runtime = made.model.experts = Experts()
    made.moet_attach()
    made.moet_gate, made.moet_prompts_fp4 = gate, prompts_fp4
    made.initialize_kv_cache(made.kv_cache_config)
    return made


def with_graphs(made):
    made.capture_model()
    for graph in made.moet_second.graphs.graphs.values():
        graph.manager = made.moet_second.graphs
    for size, graph in made.moet_second._fills.items():
        graph.replay = partial(made.moet_second._fill, size)
    made.model.calls.clear()
    made.model_state.seen.clear()
    return made


def batch(ids, lengths, computed, prefill):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([c + np.arange(n) for c, n in zip(computed, lengths, strict=True)])
    computed = np.array(computed)
    ours = {
        "req_ids": ["a", "b", "c", "d", "e"][: len(lengths)],
        "num_reqs": len(lengths),
        "num_tokens": len(ids),
        "num_tokens_after_padding": len(ids),
        "num_computed_tokens_np": computed,
        "num_scheduled_tokens": np.array(lengths),
        "prefill_len_np": np.array(prefill),
        "num_computed_prefill_tokens_np": computed,
        "idx_mapping": torch.arange(len(lengths)),
        "idx_mapping_np": np.arange(len(lengths)),
        "seq_lens": torch.tensor(computed + lengths, dtype=torch.int32),
        "seq_lens_cpu_upper_bound": torch.tensor(computed + lengths),
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "positions": torch.tensor(positions),
        "logits_indices": torch.tensor(starts[1:] - 1),
    }
    return InputBatch(**dict.fromkeys(of.name for of in fields(InputBatch)) | ours)


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
    assert made.moet_gate.replays == 0
    assert (made.moet_gate.gated_steps, made.moet_gate.flipped) == (1, 1)
    assert logits.argmax(-1).tolist()[:2] == [1, 0]
    assert logits[0].tolist() == [9.0, 20.0, 0, 0, 0, -102]  # of the second pass
    assert logits[1:, -1].tolist() == [-8, -25]
    assert hidden[:, 0].tolist() == [101, 8, 21, 23, 25]
    assert (made.moet_gate.tokens, made.moet_gate.fired) == (2, 1)


# Five requests that decode, at positions 5 to 9; the odd ones are in doubt.
DECODE = ([101, 7, 8, 99, 12], [1] * 5, [5, 6, 7, 8, 9], [1, 3, 7, 2, 4])


def test_a_graph_decides_again_what_the_pieces_would():
    eager, made = runner(Gate(0.5)), with_graphs(runner(Gate(0.5)))
    graphs = {of.num_tokens: graph for of, graph in made.moet_second.graphs.graphs.items()}
    assert set(graphs) == {1, 2, 4}  # powers of two, and no more than sequences
    expected, _ = step(eager, batch(*DECODE), CUDAGraphMode.FULL)
    logits, _ = step(made, batch(*DECODE), CUDAGraphMode.FULL)
    assert torch.equal(logits, expected)
    assert logits[:, -1].tolist() == [-102, -8, -8, -100, -12]
    assert (made.moet_gate.replays, made.moet_gate.gated_steps) == (1, 1)
    assert made.moet_gate.flipped == eager.moet_gate.flipped == 1
    ((ids, again, mode),) = made.model.calls
    assert (ids[:3], again, mode) == ([101, 7, 99], True, CUDAGraphMode.NONE)
    assert graphs[4].call[1].is_padding.tolist() == [False, False, False, True]
    (seen,) = made.model_state.seen
    assert seen == {
        "mode": CUDAGraphMode.FULL,
        "starts": [0, 1, 2, 3, 3],
        "lengths": [6, 7, 9, 0],
        "most": [6, 7, 9, 0],
        "first block": [0, 100, 300, 0],
        "slots": [5, 206, 608, PADDING],
    }


def test_more_than_the_largest_graph_run_as_pieces():
    made = with_graphs(runner(Gate(0.5)))
    logits, _ = step(made, batch([1, 3, 5, 7, 9], *DECODE[1:]), CUDAGraphMode.FULL)
    assert logits[:, -1].tolist() == [-2, -4, -6, -8, -10]
    assert (made.moet_gate.replays, made.moet_gate.gated_steps) == (0, 1)
    (seen,) = made.model_state.seen
    assert (seen["mode"], seen["lengths"]) == (CUDAGraphMode.NONE, [6, 7, 8, 9, 10])


def test_what_pieces_have_left_is_kept_from_the_graphs():
    """It lies in the memory that they share."""
    made = with_graphs(runner(Gate(0.5)))
    of = batch(*MIXED)
    made.execute_model(
        SimpleNamespace(finished_req_ids=set(), batch=of, mode=CUDAGraphMode.PIECEWISE)
    )
    made.left.fill_(7)
    logits, hidden = made.sample_tokens(None)
    assert hidden[:, 0].tolist() == [101, 8, 21, 23, 25]
    assert logits.argmax(-1).tolist()[:2] == [1, 0]


def test_graphs_are_there_only_with_a_gate():
    made = runner(None, prompts_fp4=True)
    assert made.moet_second is None
    assert made.capture_model() == 1000
    made = runner(Gate(0.5))
    assert made.capture_model(profile_only=True) == 1007  # and their bytes
    assert made.moet_second is None  # until the real cache is there
    made.cudagraph_manager.cudagraph_mode = CUDAGraphMode.PIECEWISE
    made.initialize_kv_cache(made.kv_cache_config)
    assert made.capture_model() == 1000


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
    assert "run_pw_graph" not in vars(made.cudagraph_manager)
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
    made.cudagraph_manager.cudagraph_mode = CUDAGraphMode.FULL
    with pytest.raises(UnsupportedError, match="one CUDA graph"):
        made.initialize_kv_cache(None)
