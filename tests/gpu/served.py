"""An engine on a GPU whose tiers are resized between runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moet.pack import Pack
from tests.vllm.serving import engine, generate, make_pack, prompts

IDS = prompts(8192, (3, 17, 40, 64, 1, 90, 5, 33, 12, 28, 7, 51, 2, 80, 19, 44))
TOKENS = 24


class Served:
    """rows: of all precisions that the GPU holds at first, on each rank."""

    def __init__(self, model: Path, pack: Path, llm: Any) -> None:
        self.model, self.pack, self.llm = model, Pack.open(pack), llm
        self.rows = sum(of["places"] for of in self.stats()["tiers"] if of["tier"] == "gpu")

    def resize(self, slots: int, places: int) -> None:
        values = {"base_pool": str(slots), "arena": str(places)}
        for answer in self.llm.collective_rpc("moet_resize", args=(values,)):
            assert "error" not in answer, answer

    def run(self, together: bool) -> list[list[tuple[int, float]]]:
        """Of each request the tokens and their log-probabilities: all requests at once, or some of
        them one after the other."""
        groups = [IDS] if together else [[ids] for ids in IDS[:4]]
        outputs = [o for group in groups for o in generate(self.llm, group, TOKENS, logprobs=0)]
        return [
            [(t, row[t].logprob) for t, row in zip(o.outputs[0].token_ids, o.outputs[0].logprobs,
                                                  strict=True)]
            for o in outputs
        ]  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Of the first rank."""
        return self.llm.collective_rpc("moet_stats")[0]


@contextmanager
def serve(
    model: Path, directory: Path, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """The model at 2 bits with all rows on the GPU, in CUDA graphs.

    directory: of the pack, which is made. settings, options: moet's and vLLM's, beside those here.
    """
    pack = make_pack(model, directory / "pack")
    ours = {"pack": str(pack), "base_pool": "100%", "arena": "100%"} | (settings or {})
    with engine(
        model, ours, dtype="bfloat16", enforce_eager=False, max_num_seqs=16,
        attention_backend=None, gpu_memory_utilization=0.1, enable_prefix_caching=False, **options,
    ) as llm:  # fmt: skip
        yield Served(model, pack, llm)
