"""A tiny model, a tiny dataset and a config of both; what one test compiled is there for the next."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from upjax.config import Config, DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from upjax.data.dataset import INFO_FILE, DatasetInfo, info_json
from upjax.data.shards import SplitWriter
from upjax.model import DecoderConfig, MoEConfig

VOCAB = 48
DENSE = DecoderConfig(
    vocab_size=VOCAB,
    embed_dim=16,
    hidden_dim=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_sequence_length=32,
)
MOE = dataclasses.replace(
    DENSE, moe=MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=16), moe_layers=(0, 1), tied_embeddings=True
)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compilation_cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield directory
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def dense() -> DecoderConfig:
    return DENSE


@pytest.fixture
def moe() -> DecoderConfig:
    return MOE


def write_documents(path: Path, **splits: list[list[int]]) -> Path:
    """Writes a dataset of documents given as tokens, end-of-text 0 added; a token stands for 3 bytes of text."""
    writers = {name: SplitWriter(path, name, dtype="uint16", shard_size=4000) for name in ("train", "held_out")}
    for name, documents in splits.items():
        for tokens in documents:
            writers[name].write([*tokens, 0], num_bytes=3 * len(tokens))
    info = DatasetInfo(
        tokenizer_sha256="0" * 64,
        vocab_size=VOCAB,
        end_of_text=0,
        max_token_id=VOCAB - 1,
        dtype="uint16",
        seed=0,
        held_out=0.1,
        splits={name: writer.finish() for name, writer in writers.items()},
        duplicates=0,
        empty=0,
        unreadable=(),
    )
    (path / INFO_FILE).write_text(info_json(info))
    return path


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Documents in which each token but the first mostly follows from the one before it."""
    rng = np.random.default_rng(0)

    def document(length):
        steps = np.where(rng.random(length) < 0.8, 7, rng.integers(1, VOCAB, length))
        return (1 + np.cumsum(steps) % (VOCAB - 1)).tolist()

    train, held_out = ([document(length) for length in rng.integers(5, 60, number)] for number in (200, 20))
    return write_documents(tmp_path_factory.mktemp("dataset"), train=train, held_out=held_out)


def make_tiny_config(dataset: Path, output: Path, decoder: DecoderConfig = DENSE, **sections: dict) -> Config:
    """A short run; sections replace those here, such as `train={"steps": 3}`."""
    return Config(
        output=output,
        model=ModelConfig(**{"decoder": decoder} | sections.get("model", {})),
        data=DataConfig(**{"path": dataset} | sections.get("data", {"sequence_length": 16, "batch_size": 8})),
        optimizer=OptimizerConfig(**sections.get("optimizer", {"learning_rate": 1e-2})),
        schedule=ScheduleConfig(**sections.get("schedule", {"warmup_steps": 2, "decay_steps": 4})),
        train=TrainConfig(**sections.get("train", {"steps": 12, "log_every": 1, "checkpoint_every": 4})),
    )


@pytest.fixture
def make_config(dataset, tmp_path) -> Callable[..., Config]:
    """A function that makes the config of a short run in a directory of the test."""
    return lambda output=tmp_path / "run", **given: make_tiny_config(dataset, output, **given)
