"""The private model: which module is intercepted, by what, and what is refused."""

from __future__ import annotations
