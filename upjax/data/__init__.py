"""Text to training batches: tokenize files once, then read packed sequences of them in a reproducible order."""

from upjax.data.dataset import DatasetInfo, check_vocabulary, load_info
from upjax.data.held_out import HeldOut, held_out_batches
from upjax.data.packing import PackedSequences
from upjax.data.pipeline import make_dataset
from upjax.data.tokenize import tokenize

__all__ = [
    "DatasetInfo",
    "HeldOut",
    "PackedSequences",
    "check_vocabulary",
    "held_out_batches",
    "load_info",
    "make_dataset",
    "tokenize",
]
