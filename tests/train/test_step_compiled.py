"""The whole training step, with its kernels, through the real TPU compiler for chips that are not here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upjax.config import OptimizerConfig, ScheduleConfig
from upjax.mesh import AXES
from upjax.model import DecoderConfig, Dtypes, MoEConfig
from upjax.train.optimizer import make_optimizer
from upjax.train.schedule import make_schedule
from upjax.train.state import abstract_state
from upjax.train.step import make_train_step

# SmolLM2's widths with 8 experts; four layers of its thirty, which one scan runs.
CONFIG = DecoderConfig(
    vocab_size=49152,
    embed_dim=576,
    hidden_dim=1536,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_sequence_length=2048,
    tied_embeddings=True,
    moe=MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=1536),
    moe_layers=(0, 1, 2, 3),
)
KERNELS = (
    "expert_mlp_gate_up",
    "expert_mlp_down",
    "expert_mlp_gate_up_grad",
    "expert_mlp_rows_grad",
    "expert_mlp_gate_weights_grad",
    "expert_mlp_up_weights_grad",
    "expert_mlp_down_weights_grad",
    "splash_mha_fwd",
    "splash_mha_dkv",
)


@pytest.fixture
def pod(devices_of):
    """Returns a mesh of four v5p chips: two shards of parameters times two of experts."""
    devices = devices_of("v5p:2x2x1")
    explicit = (jax.sharding.AxisType.Explicit,) * 3
    return jax.sharding.Mesh(np.array(devices).reshape(1, 2, 2), AXES, axis_types=explicit)


@pytest.mark.slow
@pytest.mark.parametrize("moe_layers", [(0, 1, 2, 3), (1, 3)], ids=["all", "every other"])
def test_the_step_compiles_for_a_pod_with_the_kernels(pod, moe_layers):
    config, dtypes = dataclasses.replace(CONFIG, moe_layers=moe_layers), Dtypes("float32", "bfloat16")
    schedule = make_schedule(ScheduleConfig(), peak=1e-4, num_steps=10)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4), schedule)
    with jax.set_mesh(pod), jax.default_matmul_precision("default"):
        step = make_train_step(
            config, dtypes, optimizer, schedule, load_balance_coefficient=0.01, z_loss_coefficient=0.001, remat="full"
        )
        spread = jax.NamedSharding(pod, jax.P(AXES, None))
        of = lambda dtype: jax.ShapeDtypeStruct((8, 2048), dtype, sharding=spread)
        batch = {name: of(jnp.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
        batch["loss_weights"] = of(jnp.float32)
        lowered = step.trace(abstract_state(config, dtypes, optimizer), batch).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
    program = lowered.as_text()
    for kernel in KERNELS:
        assert f'kernel_name = "{kernel}' in program, kernel
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes  # the state is updated in place
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 95 * 2**30  # what a v5p chip has
