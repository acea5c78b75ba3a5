"""Training: a config in, a run directory out."""

from upjax.train.loop import TrainingError, TrainResult, train

__all__ = ["TrainResult", "TrainingError", "train"]
