"""opacus.schedulers."""

from opacus.schedulers import *  # noqa: F403
