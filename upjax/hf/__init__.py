"""Hugging Face checkpoints in and out: one table a family, tensors streamed."""

from upjax.hf.families import FAMILIES, choose_family
from upjax.hf.files import copy_tokenizer
from upjax.hf.gguf import convert_gguf
from upjax.hf.reader import import_hf, read_config
from upjax.hf.writer import export_hf

__all__ = ["FAMILIES", "choose_family", "convert_gguf", "copy_tokenizer", "export_hf", "import_hf", "read_config"]
