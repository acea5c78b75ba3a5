"""A tiny routed model that the TPU compiler takes seconds for."""

from upjax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from upjax.model import DecoderConfig, Dtypes, MoEConfig

TINY = DecoderConfig(
    vocab_size=512,
    embed_dim=256,
    hidden_dim=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_sequence_length=256,
    moe=MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=512),
    moe_layers=(0, 1),
)


def tiny_config(decoder: DecoderConfig = TINY, **sections: dict) -> Config:
    """The config of a run of `decoder` on data that is not there; sections replace those here."""
    return Config(
        output="runs/tiny",
        model=ModelConfig(**{"decoder": decoder, "dtypes": Dtypes("float32", "bfloat16")} | sections.get("model", {})),
        data=DataConfig(**{"path": "data", "sequence_length": 128, "batch_size": 4} | sections.get("data", {})),
        mesh=MeshConfig(**sections.get("mesh", {"fsdp": 2, "expert": 2})),
        optimizer=OptimizerConfig(learning_rate=1e-3, **sections.get("optimizer", {})),
        train=TrainConfig(steps=10, remat="full"),
    )
