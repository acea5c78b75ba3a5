"""Rows to the devices that hold their experts, and back."""

from pallas_kernels.token_exchange.api import (
    IMPLEMENTATIONS,
    Implementation,
    all_group_sizes,
    give_back,
    received_group_sizes,
    send,
)

__all__ = ["IMPLEMENTATIONS", "Implementation", "all_group_sizes", "give_back", "received_group_sizes", "send"]
