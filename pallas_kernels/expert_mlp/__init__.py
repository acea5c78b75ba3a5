"""Rows through the gated MLPs of their experts."""

from pallas_kernels.expert_mlp.api import IMPLEMENTATIONS, Implementation, expert_mlp

__all__ = ["IMPLEMENTATIONS", "Implementation", "expert_mlp"]
