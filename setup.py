"""Packages live where ARCHITECTURE puts them; the rest of the metadata is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fastclip", "fastclip.*"]), "fastclip.kernels"],
    package_dir={"fastclip.kernels": "kernels"},
)
