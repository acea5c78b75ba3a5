"""The decoder and its parameters."""

from upjax.model.config import DecoderConfig, LayerKind, MoEConfig, RopeConfig, RouterKind, Segment
from upjax.model.decoder import Decoder, DecoderOutput
from upjax.model.parameters import Dtypes, abstract_params, build, flat_params, num_params
from upjax.model.router import RouterStats

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "Dtypes",
    "LayerKind",
    "MoEConfig",
    "RopeConfig",
    "RouterKind",
    "RouterStats",
    "Segment",
    "abstract_params",
    "build",
    "flat_params",
    "num_params",
]
