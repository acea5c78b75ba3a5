"""Upcycle a dense Hugging Face checkpoint into a Mixture-of-Experts model, train it with JAX, and hand it back.

The functions here are the commands of `upjax`: import_hf, upcycle, verify, tokenize, train, evaluate, export_hf,
plan and inspect; `load` and `save_model` stand between them and the disk.
"""

from upjax.checkpoint import save_model
from upjax.config import Config, load_config
from upjax.data import tokenize
from upjax.errors import InputError
from upjax.evaluate import evaluate, verify
from upjax.hf import export_hf, import_hf
from upjax.inspection import inspect, load
from upjax.mesh import make_mesh
from upjax.model import Decoder, DecoderConfig, Dtypes, MoEConfig
from upjax.plan import Plan, PlanError, plan
from upjax.train import TrainingError, train
from upjax.upcycle import upcycle

__all__ = [
    "Config",
    "Decoder",
    "DecoderConfig",
    "Dtypes",
    "InputError",
    "MoEConfig",
    "Plan",
    "PlanError",
    "TrainingError",
    "evaluate",
    "export_hf",
    "import_hf",
    "inspect",
    "load",
    "load_config",
    "make_mesh",
    "plan",
    "save_model",
    "tokenize",
    "train",
    "upcycle",
    "verify",
]
