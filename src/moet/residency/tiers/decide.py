"""The decisions, as functions of heat and policy: what decode keeps, and what of it on the GPU.

`Planner` carries them out; the simulation of a trace makes the same ones.
"""

from __future__ import annotations

from moet.residency.heat import Heat
from moet.residency.policy import I64, Policy


def touch(heat: Heat, policy: Policy, use: I64, step: int) -> None:
    """Decode used rows in the steps up to `step`.

    Which step used which row is not known any more, only how often each was used: the uses count
    as of the newest steps.

    Args:
        use: int64 [layers, experts], steps that used the row.
    """
    for back in range(int(use.max(initial=0)) - 1, -1, -1):
        layers, experts = (use > back).nonzero()
        heat.touch(layers, experts, step - back)
        policy.touch(layers, experts, step - back)


def swaps(
    policy: Policy, rows: I64, held: I64, room: int, margin: float
) -> tuple[list[int], list[int]]:
    """Which of `rows`, hottest first, are to be on the GPU, and whose slots they take.

    Args:
        rows: in the arena. held: on the GPU. room: free slots. margin: as of `TierOptions`.

    Returns (rows, victims): the first `len(rows) − len(victims)` rows take free slots, the others
    the slots of the victims, in this order.
    """
    wanted, victims = policy.admit(rows, held, room)
    free = len(wanted) - len(victims)
    priority = policy.priority.reshape(-1)
    wins = priority[wanted[free:]] > priority[victims] + margin
    return [*wanted[:free].tolist(), *wanted[free:][wins].tolist()], victims[wins].tolist()
