"""`make docs`: Sphinx with MyST. Nothing of agl_fast is imported, nothing is downloaded."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PROJECT = (ROOT / "pyproject.toml").read_text()

project = "agl_fast"
author = "agl_fast contributors"
# Read, not imported: Python 3.10 has no tomllib, and agl_fast is not installed here.
(release,) = re.findall(r'^version = "(.*?)"', PROJECT, re.MULTILINE)

extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
# autoapi looks for the home of every imported name, also of constants, which have no entry.
suppress_warnings = ["autoapi.python_import_resolution"]

# The pages are read on code hosts, too: links are relative paths, headings are their targets.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are Google's style with code in backticks, single or double.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autoapi_dirs = [str(ROOT / "python" / "agl_fast")]
autoapi_generate_api_docs = False
autoapi_python_class_content = "class"
autoapi_python_use_implicit_namespaces = True
autoapi_options = ["members", "show-inheritance"]
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"agl_fast {release}"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False

CODE = re.compile(r"(``[^`]+``|`[^`]+`)(\w)?")


def separate_code_from_words(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """`Call`s is no markup in reStructuredText: an escaped space makes it some."""

    def separated(found: re.Match[str]) -> str:
        return found[1] if found[2] is None else rf"{found[1]}\ {found[2]}"

    lines[:] = [CODE.sub(separated, line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", separate_code_from_words)
