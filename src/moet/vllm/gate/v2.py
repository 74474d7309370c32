"""The gate in vLLM's second model runner (`v1/worker/gpu/model_runner.py`), CUDA's default.

Here logits are computed in `sample`, by the model's `compute_logits`, so the decision is made right
behind that call, before grammar masks. The second pass is a decode step of the doubtful tokens
alone (`second_pass.py`). Their hidden states are not replaced: of what comes later, only prompt
log-probabilities are made of hidden states, and not of a prompt's last token's.

A CUDA graph sees no marks (`known_at_fp4`), so a step that has some runs without: as pieces, each
launched. When every token fires, there is no second pass: the graphs themselves run at FP4 then
(`RankExperts.all_at_fp4`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from moet.errors import UnsupportedError
from moet.vllm.gate.checks import check_cache
from moet.vllm.gate.gate import Gate, known_at_fp4, most_likely
from moet.vllm.gate.second_pass import SecondPass
from moet.vllm.phase import Fp4Tokens, mark_fp4_tokens
from moet.vllm.rank import RankExperts


class GateV2:
    """Before vLLM's runner class among the bases (`install.py`).

    moet_gate: None where only prompts run at FP4. moet_prompts_fp4: whether they do. moet_runtime:
    the rank's, which runs all experts at FP4 when it is told to. moet_second: if there is a gate.
    """

    moet_runtime: RankExperts
    moet_gate: Gate | None
    moet_prompts_fp4: bool
    moet_second: SecondPass | None = None
    execute_model_state: Any
    req_states: Any
    cudagraph_manager: Any
    device: torch.device
    model: Any
    _moet_marks: NDArray[np.bool_] | None = None  # of the step that runs
    _moet_batch: Any = None  # the step's, while logits are being computed
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
        self.moet_second = None if self.moet_gate is None else SecondPass(self)
        return made

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Also the second pass. profile_only: to learn what graphs take, with a KV cache that is
        given up afterwards."""
        size: int = super().capture_model(profile_only=profile_only)  # type: ignore[misc]
        if self.moet_second is not None:
            size += self.moet_second.capture()
            if profile_only:
                self.moet_second = None
        return size

    def shutdown(self) -> None:
        self.moet_second = None
        super().shutdown()  # type: ignore[misc]

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        gate = self.moet_gate
        if gate is not None:
            gate.forget(scheduler_output.finished_req_ids)
            everything = gate.everything
            self._moet_all_at_fp4 = self.moet_runtime.all_at_fp4(everything) and everything
        try:
            made = super().execute_model(  # type: ignore[misc]
                scheduler_output, *args, **kwargs
            )
        finally:
            self._run_pieces_by_graph(True)
        if gate is not None and gate.tau > 0 and not self._moet_all_at_fp4:
            self._keep_hidden_states()
        return made

    def _keep_hidden_states(self) -> None:
        """What graphs of pieces have left lies in the pool of all graphs, where the second pass's
        would write over it."""
        state = self.execute_model_state
        own = getattr(self.cudagraph_manager, "hidden_states", None)
        if state is None or state.hidden_states is None:
            return
        if own is None or state.hidden_states.data_ptr() != own.data_ptr():
            self.execute_model_state = state._replace(hidden_states=state.hidden_states.clone())

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

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        self._moet_batch = input_batch
        try:
            return super().sample(  # type: ignore[misc]
                hidden_states, input_batch, grammar_output
            )
        finally:
            self._moet_batch = self._moet_marks = None

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
        if self._moet_marks is None or self._moet_batch is not None:
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
        batch = self._moet_batch
        if batch is None or gate is None or gate.tau <= 0:
            return logits  # also for prompt log-probabilities
        fired, before = self._fired(gate, batch, logits)
        if before is None or not fired.size:
            return logits
        assert self.moet_second is not None
        with gate.stopwatch.timed(self.device):
            states, rows, replayed = self.moet_second.run(batch, fired)
            again = compute(states, *args, **kwargs)
            logits[rows] = again
            gate.count_flips(before[rows], again.argmax(-1))
            gate.replays += replayed
        return logits

    def _fired(
        self, gate: Gate, batch: Any, logits: Tensor
    ) -> tuple[NDArray[np.int64], Tensor | None]:
        """The requests of the step, by index, whose last token fires: int64 [n], ascending; and the
        most likely successor of all requests' last tokens, int64 [requests], None if all are at FP4
        already: then nothing need be waited for."""
        ends = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        asked = (ends >= batch.prefill_len_np).nonzero()[0]  # not of pieces of prompts
        prompts = self.req_states.prompt_len.np[batch.idx_mapping_np]
        confidence, successors = np.zeros(len(ends), np.float32), None
        if not self._moet_all_at_fp4:
            confidence, successors = most_likely(logits)
        fires = gate.decide(
            [batch.req_ids[request] for request in asked.tolist()],
            ends[asked].astype(np.int64) - 1,
            prompts[asked].astype(np.int64) - 1,
            confidence[asked],
            again=successors is not None,
        )
        return np.asarray(asked[fires], np.int64), successors
