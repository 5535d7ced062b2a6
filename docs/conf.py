"""Sphinx's configuration of the site: `make docs` builds it into build/docs. docs/_ext/ has what is our own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import nanoinfer

project = "nanoinfer"
copyright = "the nanoinfer maintainers"
release = nanoinfer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "nanoinfer_site"]
root_doc = "index"
exclude_patterns = ["results"]  # files that programs write
default_role = "code"  # in docstrings, `name` is code
smartquotes = False  # of --option, they would make a dash
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4  # links to headings, by GitHub's rule

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80

html_theme = "sphinx_book_theme"
html_title = f"nanoinfer {release}"
html_theme_options = {
    "show_toc_level": 2, "use_download_button": False, "navbar_persistent": [], "footer_content_items": ["copyright"],
}  # fmt: skip
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
