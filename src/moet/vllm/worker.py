"""Methods for vLLM's workers: `--worker-extension-cls moet.vllm.worker.MoetWorkerExtension`."""

from __future__ import annotations

from typing import Any

from moet.errors import ConfigError


class MoetWorkerExtension:
    """Mixed into vLLM's worker class; called through `collective_rpc`."""

    vllm_config: Any

    def moet_stats(self) -> dict[str, Any]:
        """This rank's residency statistics (`stats.rank_stats`)."""
        from moet.vllm.method import find_runtime

        runtime = find_runtime(self.vllm_config)
        if runtime is None:
            raise ConfigError("this server does not serve with moet.", "Add --quantization moet.")
        return runtime.stats()
