"""opacus.schedulers."""

from opacus.schedulers import *  # noqa: F403

from fastclip.opacus.rest import rest_of

__getattr__ = rest_of("opacus.schedulers")
