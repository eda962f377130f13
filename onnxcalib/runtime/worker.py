"""Run as a script of its own: opens models that may end the process, and says how it went.

Says that it is ready; then reads lines of JSON with a level and a path, and answers each with a line: an empty text, or
why the model was refused.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Answers until nobody asks any more."""
    import onnxruntime as ort

    _say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, asked["level"])
        try:
            ort.InferenceSession(asked["path"], options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions share no base class but this one
            _say(str(error) or type(error).__name__)
        else:
            _say("")


def _say(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
