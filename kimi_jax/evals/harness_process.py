"""One run of lm-evaluation-harness: arguments as JSON on stdin, results as JSON in the file that they name.

A process of its own (`harness`): the harness sets up logging, threads and caches for the whole interpreter.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Runs and writes."""
    asked: dict[str, Any] = json.load(sys.stdin)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # its own tasks are not indexed, which takes longer than a small evaluation: the one asked for is named by its file
    arguments = {"task_manager": TaskManager(include_defaults=False), **asked["evaluate"]}
    found: Any = simple_evaluate(**arguments)
    kept = {name: found[name] for name in ("results", "n-samples", "versions", "samples") if name in found}
    Path(asked["output"]).write_text(json.dumps(kept, default=str))


if __name__ == "__main__":
    main()
