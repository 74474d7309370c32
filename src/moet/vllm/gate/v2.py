"""The gate in vLLM's second model runner (`v1/worker/gpu/model_runner.py`), CUDA's default.

Here logits are computed in `sample`, by the model's `compute_logits`, so the decision is made right
behind that call: before grammar masks, with the hidden states in hand, which are overwritten in
place (prompt log-probabilities are computed from them later). The second pass is the same as in the
first runner (`v1.py`): a decode step of the doubtful tokens alone, without CUDA graphs.

A CUDA graph sees no marks (`known_at_fp4`), so a step that has some runs without: as pieces, each
launched. When every token fires, there is no second pass: the graphs themselves run at FP4 then
(`RankExperts.all_at_fp4`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

from moet.errors import UnsupportedError
from moet.vllm.gate.checks import check_cache
from moet.vllm.gate.gate import Gate, confidence, known_at_fp4
from moet.vllm.phase import Fp4Tokens, mark_fp4_tokens
from moet.vllm.rank import RankExperts


class GateV2:
    """Before vLLM's runner class among the bases (`install.py`).

    moet_gate: None where only prompts run at FP4. moet_prompts_fp4: whether they do. moet_runtime:
    the rank's, which runs all experts at FP4 when it is told to.
    """

    moet_runtime: RankExperts
    moet_gate: Gate | None
    moet_prompts_fp4: bool
    vllm_config: Any
    kv_cache_config: Any
    attn_groups: Any
    req_states: Any
    model_state: Any
    cudagraph_manager: Any
    device: torch.device
    model: Any
    _moet_marks: NDArray[np.bool_] | None = None  # of the step that runs
    _moet_tables: tuple[tuple[Tensor, ...], Tensor]  # its block tables and KV slots, by group
    _moet_step: Any = None  # hidden states and batch, while logits are being computed
    _moet_all_at_fp4 = False  # the step that runs

    def moet_attach(self) -> None:
        """Hooks into the loaded model: its logits, and the context in which it runs."""
        if getattr(self, "uses_inputs_embeds", False):
            raise UnsupportedError(
                "the gate, and prompts at FP4, are not supported where vLLM's second model runner "
                "embeds other inputs than text.",
                "Start with --language-model-only, or without the settings gate and "
                "prefill_precision.",
            )
        if getattr(self, "batch_sharder", None) is not None:
            raise UnsupportedError(
                "the gate is not supported where ranks sample different requests.",
                "Turn off vLLM's batch-sharded sampling, or leave out the setting gate.",
            )
        compute = self.model.compute_logits
        self.model.compute_logits = lambda hidden, *args, **kwargs: self._gated(
            compute, hidden, *args, **kwargs
        )
        self.model.register_forward_pre_hook(lambda *_: self._mark())

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        if self.moet_gate is not None:
            check_cache(kv_cache_config)
        made = super().initialize_kv_cache(  # type: ignore[misc]
            kv_cache_config, *args, **kwargs
        )
        if self.cudagraph_manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            raise UnsupportedError(
                "prompts run as one CUDA graph, which cannot run some of their tokens at FP4.",
                'Start with --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'.',
            )
        return made

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        gate = self.moet_gate
        if gate is not None:
            gate.forget(scheduler_output.finished_req_ids)
            everything = gate.everything
            self._moet_all_at_fp4 = self.moet_runtime.all_at_fp4(everything) and everything
        try:
            return super().execute_model(  # type: ignore[misc]
                scheduler_output, *args, **kwargs
            )
        finally:
            self._run_pieces_by_graph(True)

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Also what vLLM chooses the step's graph by: without a uniform length, it takes none that
        is of the whole step."""
        batch, length = super().gather_batch_req_state(  # type: ignore[misc]
            scheduler_output, dummy_run
        )
        self._moet_marks = None
        if batch is not None and not self._moet_all_at_fp4:
            self._moet_marks = self._known_at_fp4(batch)
        if self._moet_marks is None:
            return batch, length
        self._run_pieces_by_graph(False)
        return batch, None

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        self._moet_tables = super().prepare_attn(input_batch)  # type: ignore[misc]
        return self._moet_tables

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        self._moet_step = hidden_states, input_batch
        try:
            return super().sample(  # type: ignore[misc]
                hidden_states, input_batch, grammar_output
            )
        finally:
            self._moet_step = self._moet_marks = None

    # -- the first pass ----------------------------------------------------------------------

    def _known_at_fp4(self, batch: Any) -> NDArray[np.bool_] | None:
        """The step's tokens that run at FP4 in the first pass: bool [tokens], or None for none."""
        computed = self.req_states.num_computed_tokens_np[batch.idx_mapping_np]
        lengths = batch.num_scheduled_tokens
        return known_at_fp4(
            batch.req_ids,
            computed,
            lengths,
            self.req_states.prompt_len.np[batch.idx_mapping_np],
            computed + lengths < batch.prefill_len_np,
            self.moet_gate,
            self.moet_prompts_fp4,
        )

    def _mark(self) -> None:
        """Called before the model runs, unless that is a replay."""
        if self._moet_marks is None or self._moet_step is not None:
            return  # the second pass marks its own tokens
        context = get_forward_context()
        mark_fp4_tokens(context, Fp4Tokens(self._moet_marks, again=False))
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE

    def _run_pieces_by_graph(self, by_graph: bool) -> None:
        """Whether a step that vLLM runs as pieces replays their graphs; not if it has marks."""
        manager = self.cudagraph_manager
        if manager is None:
            return
        if by_graph:
            vars(manager).pop("run_pw_graph", None)
        else:
            manager.run_pw_graph = lambda model, inputs: model(**inputs)

    # -- the second --------------------------------------------------------------------------

    def _gated(
        self, compute: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """In the place of the model's `compute_logits`."""
        logits = compute(hidden, *args, **kwargs)
        gate = self.moet_gate
        if self._moet_step is None or gate is None or gate.tau <= 0:
            return logits  # also for prompt log-probabilities
        states, batch = self._moet_step
        start = time.perf_counter()
        fired = self._fired(gate, batch, logits)
        if self._moet_all_at_fp4 or not fired.size:
            return logits
        rows = torch.from_numpy(fired).to(self.device)
        tokens = batch.logits_indices[rows]
        states[tokens] = self._tokens_again(batch, fired, rows, tokens)
        again = compute(states[tokens], *args, **kwargs)
        gate.flipped += int((again.argmax(-1) != logits[rows].argmax(-1)).sum())
        gate.seconds += time.perf_counter() - start
        logits[rows] = again
        return logits

    def _fired(self, gate: Gate, batch: Any, logits: Tensor) -> NDArray[np.int64]:
        """The requests of the step, by index, whose last token fires: int64 [n], ascending."""
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        asked = (ends >= batch.prefill_len_np).nonzero()[0]  # not of pieces of prompts
        prompts = self.req_states.prompt_len.np[batch.idx_mapping_np]
        fires = gate.decide(
            [batch.req_ids[request] for request in asked.tolist()],
            ends[asked].astype(np.int64) - 1,
            prompts[asked].astype(np.int64) - 1,
            # All fire: nothing need be waited for.
            np.zeros(asked.size, np.float32)
            if self._moet_all_at_fp4
            else confidence(logits)[asked],
            again=not self._moet_all_at_fp4,
        )
        return np.asarray(asked[fires], np.int64)

    def _tokens_again(
        self, batch: Any, requests: NDArray[np.int64], rows: Tensor, tokens: Tensor
    ) -> Tensor:
        """Those requests' last tokens at FP4: hidden states, [n, hidden].

        requests: indices in the step; rows: the same on the device. tokens: of the step.
        """
        tables, slots = self._moet_tables
        count = len(requests)
        starts = torch.arange(count + 1, dtype=torch.int32)
        lengths = batch.seq_lens_cpu_upper_bound[torch.from_numpy(requests)]
        slots = slots[:, tokens]
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=count,
            num_tokens=count,
            query_start_loc_gpu=starts.to(self.device),
            query_start_loc_cpu=starts,
            max_query_len=1,
            seq_lens=batch.seq_lens[rows],
            max_seq_len=int(lengths.max()),
            block_tables=[table[rows] for table in tables],
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=lengths,
            positions=batch.positions[tokens],
            is_prefilling=torch.zeros(count, dtype=torch.bool),
        )
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
            **self.model_state.prepare_inputs(batch, self.req_states),
        }
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=count,
            slot_mapping=build_slot_mappings_by_layer(slots, self.kv_cache_config),
        ):
            mark_fp4_tokens(get_forward_context(), Fp4Tokens(np.ones(count, np.bool_), again=True))
            hidden: Tensor = self.model(**{name: _of(of, tokens) for name, of in inputs.items()})
        return hidden


def _of(value: Any, tokens: Tensor) -> Any:
    """The part of a model input, [tokens] or [dimensions, tokens], that belongs to `tokens`."""
    return value[..., tokens] if isinstance(value, Tensor) else value
