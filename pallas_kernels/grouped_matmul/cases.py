"""Shapes and ways to fill the groups, shared by tests and benchmarks."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def even(rows: int, num_groups: int) -> list[int]:
    """Returns sizes that differ by one row at most and fill every row."""
    return [rows // num_groups + (group < rows % num_groups) for group in range(num_groups)]


def skewed(rows: int, num_groups: int) -> list[int]:
    """Returns sizes by Zipf's law, as a router without balance makes them: the first group is the largest."""
    ends = np.cumsum(1 / np.arange(1, num_groups + 1))
    ends = np.round(ends / ends[-1] * rows).astype(int)
    return np.diff(ends, prepend=0).tolist()


def every_other_empty(rows: int, num_groups: int) -> list[int]:
    """Returns sizes with rows in the odd groups alone; the first group is empty."""
    filled = even(rows, num_groups // 2) + [0]
    return [filled[group // 2] if group % 2 else 0 for group in range(num_groups)]


def one_row_each(rows: int, num_groups: int) -> list[int]:
    """Returns one row a group, and the rest past them all."""
    return [1] * num_groups


def all_in_one(rows: int, num_groups: int) -> list[int]:
    """Returns every row in one group, with empty ones on both sides of it."""
    return [rows if group == num_groups // 2 else 0 for group in range(num_groups)]


def tail(rows: int, num_groups: int) -> list[int]:
    """Returns uneven sizes with two fifths of the rows past their sum."""
    return skewed(rows * 3 // 5, num_groups)


def nothing(rows: int, num_groups: int) -> list[int]:
    """Returns empty groups: every row lies past the sum."""
    return [0] * num_groups


PATTERNS: dict[str, Callable[[int, int], list[int]]] = {
    pattern.__name__: pattern for pattern in (even, skewed, every_other_empty, one_row_each, all_in_one, tail, nothing)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One grouped matmul: [M, K] rows by [G, K, N] matrices, and how the rows fall to the groups."""

    name: str
    m: int
    k: int
    n: int
    num_groups: int
    pattern: str = "even"

    @property
    def group_sizes(self) -> list[int]:
        return PATTERNS[self.pattern](self.m, self.num_groups)

    def shapes(self, dtype, sharding=None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns what stands for lhs, rhs and group_sizes where a program is only compiled."""
        return (
            jax.ShapeDtypeStruct((self.m, self.k), dtype, sharding=sharding),
            jax.ShapeDtypeStruct((self.num_groups, self.k, self.n), dtype, sharding=sharding),
            jax.ShapeDtypeStruct((self.num_groups,), jnp.int32, sharding=sharding),
        )

    def arrays(self, key: jax.Array, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns random lhs and rhs, scaled so that results are of order 1, and group_sizes."""
        lhs_key, rhs_key = jax.random.split(key)
        lhs = jax.random.normal(lhs_key, (self.m, self.k))
        rhs = jax.random.normal(rhs_key, (self.num_groups, self.k, self.n)) / np.sqrt(self.k)
        return lhs.astype(dtype), rhs.astype(dtype), jnp.array(self.group_sizes, jnp.int32)


# Small, for parity: every pattern on a shape that no tile divides, and shapes that are awkward each in its own way.
TINY = [
    *(Case(name=pattern, m=300, k=136, n=160, num_groups=6, pattern=pattern) for pattern in PATTERNS),
    Case(name="whole_tiles", m=512, k=256, n=256, num_groups=4, pattern="even"),
    Case(name="k_tail", m=256, k=200, n=128, num_groups=3, pattern="skewed"),
    Case(name="n_160", m=256, k=128, n=160, num_groups=3, pattern="skewed"),
    Case(name="n_tail", m=256, k=128, n=384 + 8, num_groups=3, pattern="tail"),
    Case(name="odd_everywhere", m=131, k=77, n=45, num_groups=5, pattern="tail"),
    Case(name="one_of_each", m=1, k=1, n=1, num_groups=1),
    Case(name="fewer_rows_than_groups", m=5, k=128, n=128, num_groups=16, pattern="skewed"),
    Case(name="one_group", m=200, k=64, n=64, num_groups=1, pattern="tail"),
]

# The experts of real models, first and second matrix: for compilers and benchmarks, too large for a CPU's parity test.
REAL = [
    Case(name="smollm2_8x135m_up", m=4096, k=576, n=1536, num_groups=8),
    Case(name="smollm2_8x135m_down", m=4096, k=1536, n=576, num_groups=8),
    Case(name="mixtral_8x7b_up", m=16384, k=4096, n=14336, num_groups=8),
    Case(name="mixtral_8x7b_down", m=16384, k=14336, n=4096, num_groups=8),
    Case(name="qwen3_30b_a3b_up", m=32768, k=2048, n=768, num_groups=128),
    Case(name="qwen3_30b_a3b_down", m=32768, k=768, n=2048, num_groups=128),
    Case(name="olmoe_1b_7b_up", m=32768, k=2048, n=1024, num_groups=64),
    Case(name="olmoe_1b_7b_down", m=32768, k=1024, n=2048, num_groups=64),
]
