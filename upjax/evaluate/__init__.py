"""How good a model is, and how far two agree."""

from upjax.evaluate.compare import Agreement, verify
from upjax.evaluate.perplexity import Evaluation, evaluate

__all__ = ["Agreement", "Evaluation", "evaluate", "verify"]
