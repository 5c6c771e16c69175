"""pytest plugin: `agl_fast._core` is the sanitized build in the folder AGL_SANITIZED_CORE.

An editable install answers imports ahead of PYTHONPATH, so the module is put in place before
anything can ask for it.
"""

import importlib.util
import os
import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("sanitized", max_examples=20, deadline=None)

(library,) = Path(os.environ["AGL_SANITIZED_CORE"]).glob("_core.*.so")
spec = importlib.util.spec_from_file_location("agl_fast._core", library)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
