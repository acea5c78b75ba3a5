"""How a parameter is made, and the flat view (path -> array) that files, checkpoints and upcycling rules speak."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from upjax.errors import Problems
from upjax.mesh import has_mesh
from upjax.model.config import DecoderConfig

if TYPE_CHECKING:
    from upjax.model.decoder import Decoder

INITIAL_STD = 0.02


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """How parameters are kept and in what the layers compute. The router is kept and computed in float32 always."""

    parameters: str = "float32"
    compute: str = "float32"

    def __post_init__(self):
        allowed = ("float32", "bfloat16")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in allowed:
                raise ValueError(f"{field.name} dtype {value!r} is not one of {', '.join(allowed)}")


def normal(key: jax.Array, shape: tuple[int, ...], dtype: str, spec: P) -> nnx.Param:
    """Returns a parameter drawn from N(0, 0.02), laid out as `spec`."""
    init = jax.nn.initializers.normal(INITIAL_STD)
    return nnx.Param(init(key, shape, jnp.dtype(dtype), out_sharding=spec if has_mesh() else None))


def constant(value: float, shape: tuple[int, ...], dtype: str, spec: P | None = None) -> nnx.Param:
    """Returns a parameter filled with `value`, replicated unless `spec` says otherwise."""
    spec = spec if spec is not None else P(*[None] * len(shape))
    return nnx.Param(jnp.full(shape, value, jnp.dtype(dtype), out_sharding=spec if has_mesh() else None))


def flat_params(decoder: "Decoder") -> dict[str, jax.Array]:
    """Returns every parameter by its path, such as `segments/0/0/attention/query`."""
    return {_path(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(decoder))}


def abstract_params(config: DecoderConfig, dtypes: Dtypes) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape, dtype and sharding of every parameter by its path; makes no array.

    The sharding is that of the mesh that is set; without one, the first device's.
    """
    return {path: _placed(leaf) for path, leaf in flat_params(_abstract_decoder(config, dtypes)).items()}


def build(config: DecoderConfig, dtypes: Dtypes, flat: dict[str, jax.Array]) -> "Decoder":
    """Returns the decoder with the given parameters, as they are.

    Raises InputError that lists every path that is missing or left over and every wrong shape or dtype.
    """
    graphdef, state = nnx.split(_abstract_decoder(config, dtypes))
    expected = {_path(path): (path, variable) for path, variable in nnx.to_flat_state(state)}
    problems = Problems("the parameters do not fit the model's config")
    for path in sorted(expected.keys() - flat.keys()):
        problems.add(f"{path}: missing")
    for path in sorted(flat.keys() - expected.keys()):
        problems.add(f"{path}: not a parameter of this config")
    for path in sorted(expected.keys() & flat.keys()):
        wanted, got = expected[path][1].get_value(), flat[path]
        if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
            problems.add(
                f"{path}: {got.dtype}{list(got.shape)} where the config needs {wanted.dtype}{list(wanted.shape)}"
            )
    problems.raise_if_any()
    filled = [(path, variable.replace(flat[name])) for name, (path, variable) in expected.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def num_params(config: DecoderConfig, *, active: bool = False) -> int:
    """Returns how many parameters the model has, or with `active` how many a token meets (k of the experts)."""
    total = 0
    for path, leaf in abstract_params(config, Dtypes()).items():
        routed = "/moe/" in path and not path.endswith("/router")
        total += leaf.size * config.moe.experts_per_token // config.moe.num_experts if routed and active else leaf.size
    return total


def _abstract_decoder(config, dtypes):
    from upjax.model.decoder import Decoder

    return jax.eval_shape(lambda: Decoder(config, dtypes, key=jax.random.key(0)))


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not has_mesh():
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
        mesh = jax.sharding.get_mesh()  # the devices behind the abstract mesh, none when it is for absent ones
        sharding = leaf.sharding if mesh.empty else jax.NamedSharding(mesh, leaf.sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _path(path: tuple) -> str:
    return "/".join(str(part) for part in path)
