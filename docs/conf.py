"""`make docs`: Sphinx with MyST. Nothing is imported from agl_fast, and nothing is downloaded."""

from pathlib import Path

project = "agl_fast"
author = "the agl_fast authors"
copyright = author

extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []
templates_path = ["templates"]

# The pages are read on code hosts, too: links are relative paths, headings are link targets.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = [
    # Data that the API pages do not show.
    "autoapi.python_import_resolution",
]

# Docstrings name code in single backticks.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autoapi_dirs = [str(Path(__file__).parent.parent / "python" / "agl_fast")]
autoapi_generate_api_docs = False
autoapi_python_class_content = "class"
autoapi_options = ["members", "undoc-members", "show-inheritance"]
autoapi_keep_files = False
autodoc_typehints = "signature"

html_theme = "furo"
html_title = "agl_fast"
html_show_sourcelink = False
html_copy_source = False
