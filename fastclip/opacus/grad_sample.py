"""opacus.grad_sample."""

from opacus.grad_sample import *  # noqa: F403
from opacus.grad_sample import register_grad_sampler, register_norm_sampler

from fastclip.engine.by_hand import GradSampleHooks, GradSampleModule
from fastclip.opacus.rest import rest_of

__all__ = [
    "GradSampleHooks",
    "GradSampleModule",
    "register_grad_sampler",
    "register_norm_sampler",
]

__getattr__ = rest_of("opacus.grad_sample")
