"""Counts the bytes that a Pallas kernel's grid moves to and from HBM, by walking the grid with its own index maps.

Nothing is run: the function is traced with shapes for its arrays and values for the few that say how the rows fall to
the groups, what follows from those values is computed, and each kernel is met with the values of its scalars.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend
import numpy as np
from jax._src.state.discharge import discharge_state
from jax.extend.core import Jaxpr, Literal

UNKNOWN = object()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One call of a kernel: its name, how many grid steps it makes, and the bytes that they move.

    A kernel that has no grid moves its blocks by itself: how many bytes is not known.
    """

    name: str
    grid: tuple[int, ...]
    read_bytes: int | None
    written_bytes: int | None


def kernels(
    function: Callable, *operands: Any, cores: int, mesh: jax.sharding.AbstractMesh | None = None
) -> list[Kernel]:
    """Returns the kernels that a function calls on arrays (known) and `jax.ShapeDtypeStruct`s (not known).

    A kernel's first parallel grid dim is shared out to `cores`. `mesh` tells those that ask what they are traced for.
    """
    with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
        closed = jax.make_jaxpr(function)(*operands)
    found: list[Kernel] = []
    values = [UNKNOWN if isinstance(x, jax.ShapeDtypeStruct) else x for x in operands]
    _walk(closed.jaxpr, closed.consts, values, found, cores)
    return found


def _walk(jaxpr: Jaxpr, consts, operands, found: list[Kernel], cores: int) -> list[Any]:
    """Returns the outputs of a jaxpr as far as they are known."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
        zip(jaxpr.invars, operands, strict=True)
    )
    read = lambda atom: atom.val if isinstance(atom, Literal) else known[atom]
    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params), None)
        if eqn.primitive.name == "pallas_call":
            found.append(_count(eqn.params, inputs, cores))
            outputs = [UNKNOWN] * len(eqn.outvars)
        elif inner is not None and not all(x is not UNKNOWN for x in inputs):
            closed = inner if hasattr(inner, "consts") else jax.extend.core.ClosedJaxpr(inner, ())
            outputs = _walk(closed.jaxpr, closed.consts, inputs, found, cores)
        elif all(x is not UNKNOWN for x in inputs):
            results = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = results if eqn.primitive.multiple_results else [results]
        else:
            outputs = [UNKNOWN] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _count(params: dict[str, Any], inputs: list[Any], cores: int) -> Kernel:
    mapping = params["grid_mapping"]
    bounds = iter([int(x) for x in inputs[: mapping.num_dynamic_grid_bounds]])
    grid = tuple(dim if isinstance(dim, int) else next(bounds) for dim in mapping.grid)
    first = mapping.num_dynamic_grid_bounds
    scalars = inputs[first : first + mapping.num_index_operands]
    if any(x is UNKNOWN for x in scalars):
        raise NotImplementedError(f"kernel {params['name']}: its scalars are not known")
    if not grid:
        return Kernel(name=params["name"], grid=grid, read_bytes=None, written_bytes=None)
    steps = np.stack([axis.reshape(-1) for axis in np.meshgrid(*map(np.arange, grid), indexing="ij")])
    moved = [_moved(block, steps, scalars, grid, cores) for block in mapping.block_mappings]
    return Kernel(
        name=params["name"],
        grid=grid,
        read_bytes=sum(moved[: mapping.num_inputs]),
        written_bytes=sum(moved[mapping.num_inputs :]),
    )


def _moved(block: Any, steps: np.ndarray, scalars: list[Any], grid: tuple[int, ...], cores: int) -> int:
    """Returns the bytes of the blocks of one operand: each counts when it is not that of the step before."""
    if not block.block_shape:  # one value
        return block.array_aval.dtype.itemsize
    closed = block.index_map_jaxpr
    pure = discharge_state(closed)
    index_of = jax.vmap(lambda *step: jax.extend.core.jaxpr_as_fun(pure)(*step, *scalars)[: len(block.block_shape)])
    indices = np.stack([np.asarray(i) for i in jax.jit(index_of)(*steps.astype(np.int32))])
    shape = block.array_aval.shape
    sizes = [
        1 if not hasattr(dim, "__int__") and not hasattr(dim, "block_size") else _size(dim) for dim in block.block_shape
    ]
    changes = np.any(indices[:, 1:] != indices[:, :-1], axis=0)
    for start in _core_starts(grid, cores):
        changes[start - 1] = True
    moved = np.flatnonzero(np.append(True, changes))
    covered = [np.clip(dim - i[moved] * size, 0, size) for dim, i, size in zip(shape, indices, sizes, strict=True)]
    return int(np.prod(covered, axis=0, dtype=np.int64).sum()) * block.array_aval.dtype.itemsize


def _size(dim: Any) -> int:
    return int(getattr(dim, "block_size", dim))


def _core_starts(grid: tuple[int, ...], cores: int) -> Iterator[int]:
    """Yields the steps at which the next core begins, with the first dim that has several tiles shared out."""
    for axis, dim in enumerate(grid):
        if dim > 1:
            per_tile = math.prod(grid[axis + 1 :])
            starts = itertools.islice(itertools.count(-(-dim // cores), -(-dim // cores)), cores - 1)
            if axis == 0:
                yield from (start * per_tile for start in starts if start < dim)
            return
