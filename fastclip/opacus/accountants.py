"""opacus.accountants."""

from opacus.accountants import *  # noqa: F403
from opacus.accountants import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant

from fastclip.core.opacus_names import create_accountant, register_accountant
from fastclip.opacus.rest import rest_of

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "register_accountant",
]

__getattr__ = rest_of("opacus.accountants")
