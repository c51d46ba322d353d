"""opacus.grad_sample."""

from opacus.grad_sample import *  # noqa: F403
from opacus.grad_sample import register_grad_sampler, register_norm_sampler

from fastclip.model.by_hand import GradSampleHooks, GradSampleModule

__all__ = [
    "GradSampleHooks",
    "GradSampleModule",
    "register_grad_sampler",
    "register_norm_sampler",
]
