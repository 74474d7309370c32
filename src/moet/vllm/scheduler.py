"""vLLM's scheduler, which also ends the requests of a step whose experts could not be read.

`scheduler_config.scheduler_cls`: vLLM resolves the name and calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from moet.vllm.failures import FailedStep
from moet.vllm.gate.scheduler import KeepsGeneratedBlocks

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


class EndsFailedSteps:
    """Before one of vLLM's schedulers among the bases."""

    requests: Any
    running: Any
    kv_cache_manager: Any
    kv_cache_config: Any
    finish_requests: Any

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        ended: Iterable[Any] = ()
        if isinstance(model_runner_output, FailedStep):
            ended = self._end(scheduler_output, model_runner_output.error)
        # What has ended by now is passed over below: none of its tokens gets out.
        result: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for request in ended:
            outputs = result.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            outputs.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return result

    def _end(self, scheduler_output: Any, error: str) -> list[Any]:
        """Ends the step's requests, and those that came to share a block which it wrote.

        Where a request of the step is gone meanwhile, nobody knows its blocks any more: all that
        run are ended, and nothing of the prefix cache is kept.
        """
        scheduled = set(scheduler_output.num_scheduled_tokens)
        ids = {i for i in scheduled if i in self.requests}
        written = self._written(scheduler_output, ids)
        suspects = {block for _, block in written}
        if ids == scheduled:
            ids |= {
                request.request_id
                for request in self.running
                if written & _blocks(self.kv_cache_manager.get_block_ids(request.request_id))
            }
        else:
            ids |= {request.request_id for request in self.running}
            suspects = set(range(self.kv_cache_config.num_blocks))
        logger.error(
            "moet: %s Its %d requests end with an error: %s.", error, len(ids), ", ".join(ids)
        )
        self.kv_cache_manager.evict_blocks(suspects)
        ended: list[Any] = self.finish_requests(ids, RequestStatus.FINISHED_ERROR)
        return ended

    def _written(self, scheduler_output: Any, ids: set[str]) -> set[tuple[int, int]]:
        """The KV blocks that the step wrote to: (group, block)."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        groups = self.kv_cache_config.kv_cache_groups
        written: set[tuple[int, int]] = set()
        for request in ids:
            blocks = self.kv_cache_manager.get_block_ids(request)
            for group, own in enumerate(blocks):
                first = computed[request] // groups[group].kv_cache_spec.block_size
                written.update((group, block) for block in own[first:])
        return written


class _Sync(EndsFailedSteps, KeepsGeneratedBlocks, Scheduler):  # type: ignore[misc]
    pass


class _Async(EndsFailedSteps, KeepsGeneratedBlocks, AsyncScheduler):  # type: ignore[misc]
    pass


def make_scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """What vLLM makes in its engine's process instead of its own."""
    kind = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return kind(vllm_config=vllm_config, **arguments)


def _blocks(of_groups: Iterable[Iterable[int]]) -> set[tuple[int, int]]:
    return {(group, block) for group, own in enumerate(of_groups) for block in own}
