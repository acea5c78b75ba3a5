"""The experts of real models, shared by compile tests and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.cases import PATTERNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """[M, D] rows through E experts of width F, and how the rows fall to them (see `grouped_matmul.cases.PATTERNS`)."""

    name: str
    M: int
    D: int
    F: int
    E: int
    pattern: str = "even"

    @property
    def group_sizes(self) -> list[int]:
        return PATTERNS[self.pattern](self.M, self.E)

    def shapes(self, dtype, weight_dtype=None, sharding=None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what stands for the operands of `expert_mlp` where a program is only compiled, in their order."""
        M, D, F, E = self.M, self.D, self.F, self.E
        of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        weights = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
        return {
            "rows": of((M, D), dtype),
            **{name: of(shape, weight_dtype or dtype) for name, shape in weights.items()},
            "group_sizes": of((E,), jnp.int32),
        }


REAL = {
    case.name: case
    for case in (
        Case(name="smollm2", M=8192, D=576, F=1536, E=8),  # SmolLM2-135M upcycled to 8 experts
        Case(name="mixtral", M=16384, D=4096, F=14336, E=8),  # Mixtral 8x7B
        Case(name="olmoe", M=32768, D=2048, F=1024, E=64),  # OLMoE-1B-7B
        Case(name="qwen3", M=65536, D=2048, F=768, E=128),  # Qwen3-30B-A3B
        Case(name="deepseek", M=32768, D=7168, F=2048, E=32),  # DeepSeek-V3: of its 256 experts a shard of eight's
    )
}
