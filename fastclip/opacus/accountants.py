"""opacus.accountants."""

from opacus.accountants import *  # noqa: F403
