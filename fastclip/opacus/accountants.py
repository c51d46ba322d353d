"""opacus.accountants."""

from opacus.accountants import *  # noqa: F403

from fastclip.opacus.rest import rest_of

__getattr__ = rest_of("opacus.accountants")
