"""Upcycling: rules that make a larger model of a smaller one."""

from upjax.upcycle.dense_to_moe import METHODS, moe_config, upcycle
from upjax.upcycle.rules import Rule, apply_rules

__all__ = ["METHODS", "Rule", "apply_rules", "moe_config", "upcycle"]
