"""The gate in vLLM's first model runner (`v1/worker/gpu_model_runner.py`), which the CPU's is too.

`execute_model` ends with the step's logits in `execute_model_state`, before anything is sampled:
grammar masks, penalties and sampling come later, in `sample_tokens`. There the step's doubtful
tokens are run through the model once more.

The second pass is a decode step of its own, of those tokens only: each is the last of its request,
so it attends to the KV cache alone, at the positions that the first pass has written, whatever the
attention backend does with prompts. It runs without CUDA graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import (
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from moet.vllm.gate.checks import check_cache
from moet.vllm.gate.gate import Gate, known_at_fp4, most_likely
from moet.vllm.phase import Fp4Tokens, mark_fp4_tokens
from moet.vllm.rank import RankExperts


class GateV1:
    """Before vLLM's runner class among the bases (`install.py`).

    moet_gate: None where only prompts run at FP4. moet_prompts_fp4: whether they do. moet_runtime:
    the rank's.
    """

    moet_runtime: RankExperts
    moet_gate: Gate | None
    moet_prompts_fp4: bool
    vllm_config: Any
    execute_model_state: Any
    kv_cache_config: Any
    attn_groups: Any
    input_batch: Any
    requests: Any
    query_start_loc: Any
    optimistic_seq_lens_cpu: Tensor
    discard_request_mask: Any
    seq_lens: Tensor
    device: torch.device
    model: Any
    _moet_pass: tuple[Any, dict[str, Any]]  # of the step that runs: forward context and inputs
    _moet_all_at_fp4 = False  # the step that runs
    _moet_ends: Tensor  # [requests]: of each, its last token's index in the step

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        if self.moet_gate is not None:
            check_cache(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self._moet_ends = prepared[0]
        return prepared

    def _model_forward(self, **inputs: Any) -> Any:
        context = get_forward_context()
        marks = None if self._moet_all_at_fp4 else self._known_at_fp4()
        if marks is not None:
            mark_fp4_tokens(context, Fp4Tokens(marks, again=False))
            # What a CUDA graph has captured does not see the marks.
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        self._moet_pass = context, inputs
        return super()._model_forward(**inputs)  # type: ignore[misc]

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        gate = self.moet_gate
        if gate is not None:
            gate.forget(scheduler_output.finished_req_ids)
            everything = gate.everything
            self._moet_all_at_fp4 = self.moet_runtime.all_at_fp4(everything) and everything
        output = super().execute_model(  # type: ignore[misc]
            scheduler_output, intermediate_tensors
        )
        state = self.execute_model_state
        if gate is not None and gate.tau > 0 and output is None and state is not None:
            self._decide_again(gate, state)
        return output

    def _decide_again(self, gate: Gate, state: Any) -> None:
        """Replaces, in the step's state, the hidden states and logits of the tokens that fire."""
        fired, before = self._fired(gate, state.logits)
        if self._moet_all_at_fp4 or not (fired.size or gate.everything):
            return
        with gate.stopwatch.timed(self.device):
            asked = async_tensor_h2d(fired, self.device)
            if gate.everything:
                state.hidden_states.copy_(self._step_again())
                fired = np.arange(len(state.logits))  # pieces of prompts, too
            rows = async_tensor_h2d(fired, self.device)
            tokens = self._moet_ends[rows]
            if not gate.everything:
                state.hidden_states[tokens] = self._tokens_again(fired, rows, tokens)
            state.sample_hidden_states[rows] = state.hidden_states[tokens]
            state.logits[rows] = self.model.compute_logits(state.sample_hidden_states[rows])
            gate.count_flips(before[asked], state.logits[asked].argmax(-1))

    def _fired(self, gate: Gate, logits: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """The requests of the step, by index, whose last token fires: int64 [n], ascending; and the
        most likely successor of all requests' last tokens.

        Pieces of a prompt but the last are not asked: where a prompt is cut depends on others.
        """
        batch = self.input_batch
        asked = (~self.discard_request_mask.np[: batch.num_reqs]).nonzero()[0]
        confidence, successors = most_likely(logits)
        fires = gate.decide(
            [batch.req_ids[request] for request in asked.tolist()],
            self.optimistic_seq_lens_cpu.numpy()[asked].astype(np.int64) - 1,
            batch.num_prompt_tokens[asked].astype(np.int64) - 1,
            confidence[asked],
            again=not self._moet_all_at_fp4,
        )
        return np.asarray(asked[fires], np.int64), successors

    def _known_at_fp4(self) -> NDArray[np.bool_] | None:
        """The step's tokens that run at FP4 in the first pass: bool [tokens], or None for none."""
        batch = self.input_batch
        starts = self.query_start_loc.np[: batch.num_reqs + 1]
        return known_at_fp4(
            batch.req_ids,
            batch.num_computed_tokens_cpu[: batch.num_reqs],
            np.diff(starts),
            batch.num_prompt_tokens[: batch.num_reqs],
            self.discard_request_mask.np[: batch.num_reqs],
            self.moet_gate,
            self.moet_prompts_fp4,
        )

    def _step_again(self) -> Tensor:
        """The whole step at FP4: its hidden states, [tokens, hidden]."""
        context, inputs = self._moet_pass
        again = dataclasses.replace(
            context,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=None,
            moe_layer_index=0,
            additional_kwargs={},
        )
        tokens = int(self.query_start_loc.np[self.input_batch.num_reqs])
        mark_fp4_tokens(again, Fp4Tokens(np.ones(tokens, np.bool_), again=True))
        with override_forward_context(again):
            hidden: Tensor = super()._model_forward(**inputs)  # type: ignore[misc]
        return hidden

    def _tokens_again(self, requests: NDArray[np.int64], rows: Tensor, tokens: Tensor) -> Tensor:
        """Those requests' last tokens at FP4, `tokens` in the step: hidden states, [n, hidden].

        rows: `requests` on the device.
        """
        _, inputs = self._moet_pass
        count = len(requests)
        metadata, slots = self._decode_metadata(requests, rows, tokens)
        chosen = {
            **inputs,
            "input_ids": _of(inputs["input_ids"], tokens),
            "positions": inputs["positions"][..., tokens],
            "inputs_embeds": _of(inputs["inputs_embeds"], tokens),
        }
        with set_forward_context(metadata, self.vllm_config, num_tokens=count, slot_mapping=slots):
            mark_fp4_tokens(get_forward_context(), Fp4Tokens(np.ones(count, np.bool_), again=True))
            hidden: Tensor = super()._model_forward(**chosen)  # type: ignore[misc]
        return hidden

    def _decode_metadata(
        self, requests: NDArray[np.int64], rows: Tensor, tokens: Tensor
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Attention metadata and KV slots by layer, of a step that decodes one token a request."""
        count = len(requests)
        lengths = self.optimistic_seq_lens_cpu[torch.from_numpy(requests)]
        starts = torch.arange(count + 1, dtype=torch.int32)
        starts_on_device = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        seq_lens = self.seq_lens[rows]
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for group, spec in enumerate(self.kv_cache_config.kv_cache_groups):
            table = self.input_batch.block_table[group]
            slot_mapping = table.slot_mapping.gpu[tokens]
            common = CommonAttentionMetadata(
                query_start_loc=starts_on_device,
                query_start_loc_cpu=starts,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=int(lengths.max()),
                block_table_tensor=table.get_device_tensor(self.input_batch.num_reqs)[rows],
                slot_mapping=slot_mapping,
                causal=True,
                is_prefilling=torch.zeros(count, dtype=torch.bool),
                positions=seq_lens.long() - 1,
            )
            for attention in self.attn_groups[group]:
                built = attention.build_metadata(common)
                metadata |= dict.fromkeys(attention.layer_names, built)
            slots |= dict.fromkeys(spec.layer_names, slot_mapping)
        return metadata, slots


def _of(tensor: Tensor | None, tokens: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[tokens]
