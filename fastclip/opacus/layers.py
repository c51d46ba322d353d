"""opacus.layers."""

from opacus.layers import *  # noqa: F403
