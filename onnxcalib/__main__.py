"""python -m onnxcalib is the command onnxcalib."""

from onnxcalib.cli.main import main

if __name__ == "__main__":
    main()
