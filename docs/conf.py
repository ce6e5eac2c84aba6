"""Sphinx configuration: Markdown through MyST, the API from docstrings, pictures at build time."""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from docutils import nodes

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

project = "lastlayer"
author = "The lastlayer contributors"
copyright = "the lastlayer contributors"
try:
    release = installed_version("lastlayer")
except PackageNotFoundError:  # the package is not installed
    release = ""

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated"]
nitpicky = True
# Classes of torch and Python: links to their documentation would need network access.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|collections|typing|pathlib)\..*"),
    ("py:class", "Tensor|Axes|Figure"),
    # Types of keyword arguments that the docstrings spell out.
    ("py:class", r"lastlayer\.(fused|heads)\.[a-z_.]+\.\w*Options"),
    # Types of the fields of results, which docs/lab.md describes.
    ("py:.*", r"(lastlayer\.lab\.[a-z_]+\.)?(Verdict|Run|Trained|Results|LabError)"),
]

myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# MathJax is loaded when a page is viewed, not when it is built.
myst_update_mathjax = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Reference", "notes_style")]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "lastlayer"
html_static_path = ["_static"]
html_css_files = ["lastlayer.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0072B2",
        "color-brand-content": "#0072B2",
        "color-brand-visited": "#7A4E8C",
    },
    "dark_css_variables": {
        "color-brand-primary": "#56B4E9",
        "color-brand-content": "#56B4E9",
        "color-brand-visited": "#CC99C0",
    },
}


def _draw_pictures(_app: Any) -> None:
    import class_parallel_tables
    import pictures

    pictures.draw_all(HERE / "_generated")
    class_parallel_tables.write_all(HERE / "_generated")


def _trim_code(_app: Any, doctree: nodes.document) -> None:
    """Removes the blank line at the end of examples, which only doctest needs."""
    for block in doctree.findall(nodes.literal_block):
        block.rawsource = block.astext().rstrip("\n")
        block.clear()
        block.append(nodes.Text(block.rawsource))


def setup(app: Any) -> None:
    app.connect("builder-inited", _draw_pictures)
    app.connect("doctree-read", _trim_code)
