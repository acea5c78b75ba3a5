"""The step of a run and the shapes of what it takes: `train` compiles it for its devices, `plan` for absent ones."""

import dataclasses

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from upjax.config import Config
from upjax.mesh import BATCH, has_mesh
from upjax.model import DecoderConfig
from upjax.train.optimizer import make_optimizer
from upjax.train.schedule import make_schedule
from upjax.train.state import TrainState, abstract_state
from upjax.train.step import TrainStep, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a run computes; the same for any mesh."""

    config: Config
    decoder: DecoderConfig
    optimizer: optax.GradientTransformation
    step: TrainStep

    def abstract_state(self) -> TrainState:
        """Returns the shapes and shardings of the state that `step` takes, on the mesh that is set."""
        return abstract_state(self.decoder, self.config.model.dtypes, self.optimizer)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and shardings of the batch that `step` takes, on the mesh that is set."""
        shape, sharding = (self.config.data.batch_size, self.config.data.sequence_length), batch_sharding()
        ints = {name: np.int32 for name in ("tokens", "targets", "segment_ids", "positions")}
        dtypes = ints | {"loss_weights": np.float32}
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def make_program(config: Config, decoder: DecoderConfig) -> Program:
    """Returns the optimizer and the step that the config asks for."""
    trained = decoder
    if config.train.capacity_factor is not None:  # of the step alone: evaluation takes all tokens that come
        moe = dataclasses.replace(decoder.moe, capacity_factor=config.train.capacity_factor)
        trained = dataclasses.replace(decoder, moe=moe)
    schedule = make_schedule(config.schedule, peak=config.optimizer.learning_rate, num_steps=config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    step = make_train_step(
        trained,
        config.model.dtypes,
        optimizer,
        schedule,
        load_balance_coefficient=config.train.load_balance_coefficient,
        z_loss_coefficient=config.train.z_loss_coefficient,
        remat=config.train.remat,
        num_microbatches=config.optimizer.gradient_accumulation,
    )
    return Program(config=config, decoder=decoder, optimizer=optimizer, step=step)


def batch_sharding() -> jax.sharding.Sharding:
    """Returns how a batch lies on the mesh that is set; without one, on the first device."""
    if not has_mesh():
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.NamedSharding(jax.sharding.get_mesh(), P(BATCH, None))
