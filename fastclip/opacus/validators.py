"""opacus.validators."""

from opacus.validators import *  # noqa: F403
