"""Which requests a failed step ends, and which blocks leave the prefix cache.

A real server's failed step is in test_serving_modes.py; here are the cases that need several
requests at one moment.
"""

from __future__ import annotations

from types import SimpleNamespace

from vllm.v1.outputs import ModelRunnerOutput

from moet.vllm.failures import FailedStep
from moet.vllm.scheduler import EndsFailedSteps

BLOCK = 16
FAILED = FailedStep.of(ModelRunnerOutput(req_ids=[], req_id_to_index={}), "a row is damaged.")


class Request(SimpleNamespace):
    client_index = 0
    trace_headers = None

    def get_finished_reason(self):
        return "error"

    def take_events(self):
        return None


class Vllm:
    """What EndsFailedSteps uses of vLLM's scheduler; blocks: of each request."""

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.requests = {name: Request(request_id=name) for name in blocks}
        self.running = list(self.requests.values())
        self.evicted: set[int] = set()
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: (blocks[name],), evict_blocks=self.evicted.update
        )
        spec = SimpleNamespace(block_size=BLOCK)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=100
        )

    def finish_requests(self, names, status):
        assert "ERROR" in status.name
        ended = [self.requests.pop(name) for name in sorted(names)]
        self.running = list(self.requests.values())
        return ended

    def update_from_output(self, scheduler_output, output):
        return {}


class Scheduler(EndsFailedSteps, Vllm):
    pass


def step(**computed: int) -> SimpleNamespace:
    """A step of requests of which so many tokens were computed before."""
    cached = SimpleNamespace(req_ids=list(computed), num_computed_tokens=list(computed.values()))
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(computed, 1),
        scheduled_cached_reqs=cached,
        scheduled_new_reqs=[],
    )


def ended(outputs) -> list[str]:
    return [o.request_id for of in outputs.values() for o in of.outputs]


def test_those_of_the_step_and_those_that_share_what_it_wrote():
    blocks = {"a": [1, 2, 3], "b": [1, 9], "c": [1, 2, 3, 7], "d": [1, 2, 8]}
    scheduler = Scheduler(blocks)
    # "a" writes block 3; 1 and 2 are older.
    outputs = scheduler.update_from_output(step(a=2 * BLOCK), FAILED)
    assert ended(outputs) == ["a", "c"]
    assert scheduler.evicted == {3}
    assert {request.request_id for request in scheduler.running} == {"b", "d"}


def test_an_aborted_request_leaves_nothing_to_be_trusted():
    scheduler = Scheduler({"a": [1, 2], "b": [3]})
    outputs = scheduler.update_from_output(step(a=BLOCK, gone=0), FAILED)
    assert ended(outputs) == ["a", "b"]
    assert scheduler.evicted == set(range(100))


def test_a_step_that_did_not_fail_is_vllms():
    scheduler = Scheduler({"a": [1]})
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    assert scheduler.update_from_output(step(a=0), output) == {}
    assert list(scheduler.requests) == ["a"]
