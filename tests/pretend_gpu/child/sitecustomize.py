"""Found by each Python process that one with a pretend GPU starts: it gets one too, as soon as it imports torch."""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _others() -> None:
    """What would have been found if this were not here."""
    paths = [path for path in sys.path if os.path.abspath(path) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_others()
if os.environ.get("PRETEND_GPU", "0") not in ("", "0"):
    from tests.pretend_gpu import vehicle

    vehicle.install()
