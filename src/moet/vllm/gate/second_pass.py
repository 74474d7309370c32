"""The second pass of vLLM's second model runner: a decode step of its own, as a CUDA graph.

vLLM's own classes prepare, capture and replay it, as they do the runner's decode steps, over a
second set of input buffers: what the first pass has been given stays as it is. Both sets of graphs
share vLLM's memory pool, and the buffers that attention backends keep, which are filled anew for
each pass. Our buffers are filled by a graph as well: the host has nothing else to do meanwhile, and
would be slower than the pass of a small model.
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
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
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
        self._tables = _other_inputs(runner.block_tables, most)
        # Requests of the step, by index; −1 behind the last.
        self._rows = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._rows_on_host = torch.full((most,), -1, pin_memory=device.type == "cuda")
        self._fills: dict[int, torch.cuda.CUDAGraph] = {}  # by padded number of tokens
        mode = CUDAGraphMode.NONE
        # Positions in several dimensions are in a buffer that the model's state keeps.
        plain = not runner.model_state.prepare_dummy_inputs(1, 1)
        if plain and runner.cudagraph_manager.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            mode = CUDAGraphMode.FULL_DECODE_ONLY
        self.graphs = SecondPassGraphs(runner.vllm_config, device, mode, decode_query_len=1)

    @torch.inference_mode()
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
            for size in self.graphs.captured_token_counts():
                self._fill(size)  # loads its kernels
                graph = torch.cuda.CUDAGraph()
                with (
                    cudagraph_utils.capture_pool(self.graphs.pool, runner.vllm_config) as pool,
                    torch.cuda.graph(graph, pool),
                ):
                    self._fill(size)
                self._fills[size] = graph
            return int(free - torch.accelerator.get_memory_info()[0])

    def run(self, batch: InputBatch, requests: NDArray[np.int64]) -> tuple[Tensor, Tensor, bool]:
        """Those requests' last tokens again: their hidden states, [n, hidden]; `requests` on the
        device, int64 [n]; and whether a graph has computed them. Valid until the next call, before
        which the device must have come this far.

        batch: the step's. requests: indices in it, [n].
        """
        runner, count = self._runner, len(requests)
        chosen = self.graphs.dispatch(count, count, 1, 0)
        by_graph = chosen.cg_mode == CUDAGraphMode.FULL
        padded = chosen.num_tokens
        self._rows_on_host.numpy()[:padded] = -1
        self._rows_on_host.numpy()[:count] = requests
        self._rows[:padded].copy_(self._rows_on_host[:padded], non_blocking=True)
        if by_graph:
            self._fills[padded].replay()
        else:
            self._fill(padded)
        rows = self._rows[:count]
        slots = self._tables.slot_mappings[:, :padded]
        metadata = runner.model_state.prepare_attn(
            self._batch(batch, requests, rows, padded),
            chosen.cg_mode,
            tuple(table[:padded] for table in self._tables.input_block_tables),
            slots,
            runner.attn_groups,
            runner.kv_cache_config,
        )
        if by_graph:
            return self.graphs.run_fullgraph(chosen)[:count], rows, True
        inputs = {
            "input_ids": self._buffers.input_ids[:count],
            "positions": self._buffers.positions[:count],
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        for name, value in runner.model_state.prepare_inputs(batch, runner.req_states).items():
            inputs[name] = value
            if isinstance(value, Tensor):
                inputs[name] = value[..., batch.logits_indices[rows]]
        slots_by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=count, slot_mapping=slots_by_layer
        ):
            return self._at_fp4(**inputs), rows, False

    def _fill(self, padded: int) -> None:
        """Fills our buffers with the last tokens of the requests in `_rows`.

        Launches only, over tensors that stay where they are, so that it may be captured. Padding
        has no sequence, writes no KV, and reads no block of anyone's.
        """
        step, step_tables = self._runner.input_buffers, self._runner.block_tables
        own, padding = self._buffers, self._buffers.is_padding[:padded]
        torch.lt(self._rows[:padded], 0, out=padding)
        rows = self._rows[:padded].clamp(min=0)
        tokens = step.query_start_loc[1:][rows].long() - 1
        own.input_ids[:padded] = step.input_ids[tokens]
        own.positions[:padded] = step.positions[tokens]
        own.seq_lens.zero_()
        own.seq_lens[:padded] = step.seq_lens[rows].masked_fill(padding, 0)
        own.query_start_loc[1 : padded + 1] = (~padding).cumsum(0)
        tables = zip(self._tables.input_block_tables, step_tables.input_block_tables, strict=True)
        for table, source in tables:
            table[:padded] = source[rows].masked_fill(padding[:, None], 0)
        slots = self._tables.slot_mappings.fill_(PAD_SLOT_ID)
        slots[:, :padded] = step_tables.slot_mappings[:, tokens].masked_fill(padding, PAD_SLOT_ID)

    def _at_fp4(self, **inputs: Any) -> Tensor:
        """The model, all of whose tokens are marked: a graph can take no others. Padding, too."""
        count = inputs["positions"].shape[-1]
        mark_fp4_tokens(get_forward_context(), Fp4Tokens(np.ones(count, np.bool_), again=True))
        hidden: Tensor = self._runner.model(**inputs)
        return hidden

    def _batch(
        self, batch: InputBatch, requests: NDArray[np.int64], rows: Tensor, padded: int
    ) -> InputBatch:
        """A batch that decodes these requests' last tokens, in our buffers."""
        buffers, count = self._buffers, len(requests)
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
    return own
