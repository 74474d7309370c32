"""Which source, architecture and constants serve a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from moet.errors import UnsupportedError

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""The compute capabilities that the kernels are compiled for in the tests."""


@dataclass(frozen=True)
class Target:
    """How the kernels are compiled for one compute capability.

    architecture: as in `sm_90a`. decode: the decode kernel's source. wgmma: Hopper's matrix
    instructions; block_scaled: sm_120's.
    """

    architecture: str
    decode: str
    wgmma: bool = False
    block_scaled: bool = False

    @classmethod
    def of(cls, major: int, minor: int) -> Target:
        """Raises UnsupportedError below sm_80.

        Decoding in FP8 keeps its columns in shared memory, of which sm_89 and sm_120 have too
        little; at their memory's bandwidth BF16 is fast enough.
        """
        if major < 8:
            raise UnsupportedError(
                f"GPUs of compute capability {major}.{minor} have no BF16 tensor cores.",
                "The kernels need an NVIDIA GPU of compute capability 8.0 or later.",
            )
        if (major, minor) == (9, 0):
            return cls("90a", "decode_fp8.cu", wgmma=True)
        if major == 10:
            return cls(f"{major}{minor}", "decode_fp8.cu")
        if major == 12:
            return cls(f"{major}{minor}a", "decode.cu", block_scaled=True)
        return cls(f"{major}{minor}", "decode.cu")

    def defines(self) -> dict[str, int]:
        """The constants that choose instructions."""
        chosen = {"WGMMA": self.wgmma, "BLOCK_SCALED": self.block_scaled}
        return {name: 1 for name, value in chosen.items() if value}
