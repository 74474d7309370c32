"""Methods for vLLM's workers: `--worker-extension-cls moet.vllm.worker.MoetWorkerExtension`."""

from __future__ import annotations

from typing import Any

from moet.errors import ConfigError


class MoetWorkerExtension:
    """Mixed into vLLM's worker class; called through `collective_rpc`."""

    vllm_config: Any

    def moet_stats(self) -> dict[str, Any]:
        """This rank's residency statistics (`stats.rank_stats`)."""
        stats: dict[str, Any] = self._moet_runtime().stats()
        return stats

    def moet_about(self) -> dict[str, Any]:
        """What is served, as JSON: the rows' identity (a pack's digest), moet's settings as they
        were given, and vLLM's limits."""
        config = self.vllm_config
        return {
            "model": config.model_config.model,
            "revision": config.model_config.revision,
            "rows": self._moet_runtime().source.identity,
            "settings": config.additional_config.get("moet", {}),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_model_len": config.model_config.max_model_len,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        }

    def moet_gate(
        self, tau: float | None = None, cap: float | None = None
    ) -> dict[str, float] | None:
        """Changes what is given of the gate's settings, between two steps; returns all of them.

        None: this server has no gate. Raises ConfigError for values that cannot be.
        """
        from moet.settings import Settings

        gate = self._moet_runtime().gate
        if gate is None:
            return None
        given = {"tau": gate.tau if tau is None else tau, "cap": gate.cap if cap is None else cap}
        checked = Settings.parse({"gate": given}).gate
        assert checked is not None
        gate.set(checked.tau, checked.cap)
        return {"tau": gate.tau, "cap": gate.cap}

    def moet_resize(self, values: dict[str, str]) -> dict[str, Any]:
        """Changes what is given of this rank's sizes, between two steps (`resize.resize_rank`)."""
        from moet.vllm.resize import resize_rank
        from moet.vllm.tiers import most_layer_rows

        runtime = self._moet_runtime()
        layer_rows = most_layer_rows(self.vllm_config, runtime.geometry)
        return resize_rank(runtime, values, layer_rows)

    def _moet_runtime(self) -> Any:
        from moet.vllm.method import find_runtime

        runtime = find_runtime(self.vllm_config)
        if runtime is None:
            raise ConfigError("this server does not serve with moet.", "Add --quantization moet.")
        return runtime
