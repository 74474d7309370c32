"""The second pass of vLLM's second model runner: a decode step of its own, as a CUDA graph.

vLLM's own classes prepare, capture and replay it, as they do the runner's decode steps, over a
second set of input buffers: what the first pass has been given stays as it is. Both sets of graphs
share vLLM's memory pool, and the buffers that attention backends keep, which are filled anew for
each pass.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from moet.vllm.phase import Fp4Tokens, mark_fp4_tokens


class SecondPassGraphs(ModelCudaGraphManager):  # type: ignore[misc]
    """Graphs of the second pass. Of vLLM's sizes, those that are powers of two, and the largest:
    a second set must not double what capturing takes, and a padded token costs no experts."""

    compilation_config: Any

    def _init_candidates(self) -> None:
        config = self.compilation_config
        sizes = [n for n in config.cudagraph_capture_sizes or () if n <= self.max_num_reqs]
        self.compilation_config = copy.copy(config)
        self.compilation_config.cudagraph_capture_sizes = [
            n for n in sizes if n & (n - 1) == 0 or n == max(sizes)
        ]
        super()._init_candidates()


class SecondPass:
    """The doubtful tokens of a step, one a request, through the model again with all experts at
    FP4: by a graph where one is large enough, and as pieces otherwise.

    Args:
        runner: vLLM's, with its KV cache allocated.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        most, device = runner.max_num_reqs, runner.device
        self._buffers = InputBuffers(most, most, device)
        self._counting = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._tables = _other_inputs(runner.block_tables, most)
        mode = CUDAGraphMode.NONE
        # Positions in several dimensions are in a buffer that the model's state keeps.
        plain = not runner.model_state.prepare_dummy_inputs(1, 1)
        if plain and runner.cudagraph_manager.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            mode = CUDAGraphMode.FULL_DECODE_ONLY
        self.graphs = SecondPassGraphs(runner.vllm_config, device, mode, decode_query_len=1)

    def capture(self) -> int:
        """Captures the graphs, if there are to be any; returns the bytes that they take."""
        if not self.graphs.needs_capture():
            return 0
        runner = self._runner
        with freeze_gc_for_cudagraph_capture():
            torch.accelerator.empty_cache()
            free = torch.accelerator.get_memory_info()[0]
            self.graphs.capture(
                self._at_fp4,
                runner.model_state,
                self._buffers,
                None,
                self._tables,
                runner.attn_groups,
                runner.kv_cache_config,
                progress_bar_desc="Capturing CUDA graphs of the gate's second pass",
            )
            return int(free - torch.accelerator.get_memory_info()[0])

    def run(
        self, batch: InputBatch, requests: NDArray[np.int64], rows: Tensor, tokens: Tensor
    ) -> tuple[Tensor, bool]:
        """Hidden states of those requests' last tokens, [n, hidden], valid until the next call; and
        whether a graph computed them.

        batch: the step's. requests: indices in it, [n]; rows: the same on the device. tokens: of
        the step, [n].
        """
        runner, count = self._runner, len(requests)
        chosen = self.graphs.dispatch(count, count, 1, 0)
        own = self._batch(batch, requests, rows, tokens, chosen)
        tables = self._tables.gather_block_tables(own.idx_mapping, own.num_reqs_after_padding)
        slots = self._tables.compute_slot_mappings(
            own.idx_mapping, own.query_start_loc, own.positions, own.num_tokens_after_padding
        )
        metadata = runner.model_state.prepare_attn(
            own, chosen.cg_mode, tables, slots, runner.attn_groups, runner.kv_cache_config
        )
        if chosen.cg_mode == CUDAGraphMode.FULL:
            return self.graphs.run_fullgraph(chosen)[:count], True
        inputs = {
            "input_ids": own.input_ids,
            "positions": own.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        for name, value in runner.model_state.prepare_inputs(batch, runner.req_states).items():
            inputs[name] = value[..., tokens] if isinstance(value, Tensor) else value
        slots_by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=count, slot_mapping=slots_by_layer
        ):
            return self._at_fp4(**inputs), False

    def _at_fp4(self, **inputs: Any) -> Tensor:
        """The model, all of whose tokens are marked: a graph can take no others. Padding, too."""
        count = inputs["positions"].shape[-1]
        mark_fp4_tokens(get_forward_context(), Fp4Tokens(np.ones(count, np.bool_), again=True))
        hidden: Tensor = self._runner.model(**inputs)
        return hidden

    def _batch(
        self,
        batch: InputBatch,
        requests: NDArray[np.int64],
        rows: Tensor,
        tokens: Tensor,
        chosen: BatchExecutionDescriptor,
    ) -> InputBatch:
        """A batch that decodes these tokens, in our buffers, padded as a graph wants it: requests
        without tokens, tokens that are marked as padding."""
        buffers, count = self._buffers, len(requests)
        padded = max(count, chosen.num_tokens)
        torch.index_select(batch.input_ids, 0, tokens, out=buffers.input_ids[:count])
        torch.index_select(batch.positions, 0, tokens, out=buffers.positions[:count])
        torch.index_select(batch.seq_lens, 0, rows, out=buffers.seq_lens[:count])
        buffers.seq_lens[count:].zero_()
        torch.clamp(self._counting, max=count, out=buffers.query_start_loc)
        torch.ge(self._counting[:padded], count, out=buffers.is_padding[:padded])
        lengths = np.zeros(padded, np.int32)
        lengths[:count] = batch.seq_lens_cpu_upper_bound.numpy()[requests]
        return replace(
            batch,
            req_ids=[batch.req_ids[request] for request in requests.tolist()],
            num_reqs=count,
            num_reqs_after_padding=padded,
            idx_mapping=batch.idx_mapping[rows],
            idx_mapping_np=batch.idx_mapping_np[requests],
            num_scheduled_tokens=np.ones(count, np.int32),
            num_tokens=count,
            num_tokens_after_padding=padded,
            query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=np.minimum(np.arange(padded + 1, dtype=np.int32), np.int32(count)),
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_computed_tokens_np=lengths[:count] - 1,
            prefill_len_np=batch.prefill_len_np[requests],
            num_computed_prefill_tokens_np=batch.num_computed_prefill_tokens_np[requests],
            is_prefilling_np=np.zeros(count, np.bool_),
            has_prefill=False,
            decode_graph_eligible=True,
            prefill_runs_as_decode_np=None,
            input_ids=buffers.input_ids[:padded],
            positions=buffers.positions[:padded],
            is_padding=buffers.is_padding[:padded],
            prompt_lens=None if batch.prompt_lens is None else batch.prompt_lens[rows],
            fast_prefill=None,
        )


def _other_inputs(tables: Any, most: int) -> Any:
    """vLLM's block tables, whose inputs for a step of at most so many tokens are other tensors."""
    own = copy.copy(tables)
    own.input_block_tables = [torch.zeros_like(table) for table in tables.input_block_tables]
    own.slot_mappings = torch.zeros_like(tables.slot_mappings[:, :most])
    own.init_block_table_layout_tensors()
    return own
