"""The public names of Opacus, with fastclip's engine behind them.

    from fastclip.opacus import PrivacyEngine          # in your own program
    fastclip.opacus.install()                          # in a program that imports opacus
    python -m fastclip.opacus train.py --epochs 3      # in a program that you do not change

All other names are Opacus' own.
"""

from fastclip.engine.by_hand import GradSampleHooks, GradSampleModule
from fastclip.opacus import (
    accountants,
    data_loader,
    distributed,
    grad_sample,
    layers,
    optimizers,
    privacy_engine,
    schedulers,
    utils,
    validators,
)
from fastclip.opacus.engine import PrivacyEngine
from fastclip.opacus.grad_sample import register_grad_sampler
from fastclip.opacus.installation import install, installed, uninstall
from fastclip.opacus.rest import rest_of

__all__ = [
    "GradSampleHooks",
    "GradSampleModule",
    "PrivacyEngine",
    "accountants",
    "data_loader",
    "distributed",
    "grad_sample",
    "install",
    "installed",
    "layers",
    "optimizers",
    "privacy_engine",
    "register_grad_sampler",
    "schedulers",
    "uninstall",
    "utils",
    "validators",
]

__getattr__ = rest_of("opacus")
