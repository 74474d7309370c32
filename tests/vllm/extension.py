"""Worker methods that only the tests need: other settings without another boot, and logits."""

from typing import Any

from blake3 import blake3

from moet.vllm.ahead import hash_tables
from moet.vllm.build import build_runtime
from moet.vllm.gate.install import install
from moet.vllm.method import find_runtime, moet_methods
from moet.vllm.worker import MoetWorkerExtension


class ServingTestExtension(MoetWorkerExtension):
    def moet_configure(self, settings: dict[str, Any]) -> None:
        """Replaces the runtime by one with these settings, as a new start would make it."""
        self.vllm_config.additional_config = {"moet": settings}
        methods = moet_methods(self.vllm_config)
        old = find_runtime(self.vllm_config)
        layers = [method.layer for method in methods]
        moe = methods[0].moe
        new = build_runtime(self.vllm_config, layers, moe.tp_rank, moe.tp_size)
        if tables := hash_tables(self.vllm_config):
            new.foresee(tables)
        for method in methods:
            method.runtime = new
        install(self)
        old.manager.close()

    def moet_release_second_pass(self) -> None:
        """From now on the gate's second pass runs without its CUDA graphs."""
        self.model_runner.moet_second.graphs.release_graphs()

    def moet_route_as_one_group(self) -> None:
        """What sigmoid routing without groups is, for vLLM's CPU router, which has it by groups."""
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "routed_experts"):
                router = layer.router
                router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    def moet_record_logits(self) -> None:
        """From now on keeps a digest of all logits, those of prompt tokens included."""
        model = self.model_runner.model
        compute = type(model).compute_logits
        self._digest = blake3()

        def recorded(hidden_states, *args, **kwargs):
            logits = compute(model, hidden_states, *args, **kwargs)
            self._digest.update(logits.float().contiguous().numpy().tobytes())
            return logits

        model.compute_logits = recorded

    def moet_digest(self) -> str:
        """The digest of the logits since the last call."""
        digest, self._digest = self._digest.hexdigest(), blake3()
        return digest
