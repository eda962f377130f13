"""Which folders are packages; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["onnxcalib", "onnxcalib.*"]), "onnxcalib.models"],
    package_dir={"onnxcalib.models": "models"},
)
