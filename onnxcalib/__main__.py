"""python -m onnxcalib is the command onnxcalib."""

from onnxcalib.cli.main import main

main()
