"""How official checkpoints store expert matrices: tensor suffixes, dtypes, shapes, stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from moet.checkpoints.base import Family, Geometry, Projection, TensorRef
from moet.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredPart:
    """A part of a block format and the tensor that holds it.

    suffix: the tensor's name after the matrix's prefix. part: its name in `FORMATS[…].parts`.
    dtypes: safetensors dtypes it may have. shape: from the matrix's N and K.
    """

    suffix: str
    part: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], Shape]


@dataclass(frozen=True)
class Stack:
    """All experts of a layer in one tensor [experts, …], with gate and up together along N.

    transposed: an expert's block is [K, N], not [N, K].
    interleaved: gate and up rows alternate, gate first; else all of gate come first.
    """

    transposed: bool
    interleaved: bool

    def rows(self, projection: Projection, n: int) -> slice:
        """Which rows [N, …] of an expert's block are the matrix's, n in number."""
        if projection == "down":
            return slice(0, n)
        if self.interleaved:
            return slice(int(projection == "up"), 2 * n, 2)
        return slice(n, 2 * n) if projection == "up" else slice(0, n)


@dataclass(frozen=True)
class Storage:
    """A stored form: the format's name, its parts, and suffixes that may be there but say nothing
    of the weights (`input_scale` is for quantized activations). stack: None where every matrix has
    tensors of its own."""

    format: str
    parts: tuple[StoredPart, ...]
    ignored: tuple[str, ...] = ()
    stack: Stack | None = None

    @property
    def suffixes(self) -> set[str]:
        return {stored.suffix for stored in self.parts} | set(self.ignored)

    def match(
        self,
        family: Family,
        geometry: Geometry,
        tensors: Mapping[str, TensorRef],
        layer: int,
        expert: int,
        projection: Projection,
    ) -> dict[str, TensorRef]:
        """part → tensor (or the expert's block of a stack) of an expert's matrix.

        Raises CheckpointError when a tensor is missing or has another dtype or shape.
        """
        n, k = matrix_shape(geometry, projection)
        prefix = family.expert_prefix(geometry, layer, expert, projection)
        found = {}
        for stored in self.parts:
            name = family.tensor_name(prefix, stored.suffix)
            ref = tensors.get(name)
            if ref is None:
                raise CheckpointError(
                    f"tensor {name!r} is missing; {self.format} experts need it.",
                    "The checkpoint is incomplete, or its quantization_config is of another model.",
                )
            expected = self._shape(stored, geometry.num_experts, n, k, projection)
            scalar = expected == () and ref.shape == (1,)
            if ref.dtype not in stored.dtypes or not (ref.shape == expected or scalar):
                raise CheckpointError(
                    f"{ref.file}: tensor {name!r} is {ref.dtype} {list(ref.shape)}; {self.format} "
                    f"experts have {' or '.join(stored.dtypes)} {list(expected)}.",
                    "config.json and the tensors do not belong together.",
                )
            found[stored.part] = self._block(ref, expert)
        return found

    def rows(self, projection: Projection, n: int) -> slice | None:
        """Which rows of what a ref holds are the matrix's; None for all of them."""
        return None if self.stack is None else self.stack.rows(projection, n)

    def matrix_part(self, tensor: Tensor, projection: Projection, n: int) -> Tensor:
        """The matrix's own part of what a ref holds: [n, …], contiguous; factors as they are."""
        if self.stack is None:
            return tensor
        rows = tensor.T if self.stack.transposed else tensor.flatten(1)
        return rows[self.stack.rows(projection, n)].contiguous()

    def _shape(
        self, stored: StoredPart, experts: int, n: int, k: int, projection: Projection
    ) -> Shape:
        if self.stack is None:
            return stored.shape(n, k)
        shape = stored.shape(n if projection == "down" else 2 * n, k)
        return (experts, *(shape[::-1] if self.stack.transposed else shape))

    def _block(self, ref: TensorRef, expert: int) -> TensorRef:
        if self.stack is None:
            return ref
        size = ref.nbytes // ref.shape[0]
        offset = ref.offset + expert * size
        return replace(ref, offset=offset, nbytes=size, shape=ref.shape[1:])


def matrix_shape(geometry: Geometry, projection: Projection) -> tuple[int, int]:
    """(N, K) of an expert's matrix."""
    if projection == "down":
        return geometry.hidden, geometry.intermediate
    return geometry.intermediate, geometry.hidden
