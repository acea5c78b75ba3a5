"""Whether a run fits a slice of TPUs and how long it may take, before there is a slice."""

from upjax.plan.compile import PlanError
from upjax.plan.planning import Plan, plan, sweep

__all__ = ["Plan", "PlanError", "plan", "sweep"]
