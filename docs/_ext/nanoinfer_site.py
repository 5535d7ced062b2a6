"""What Sphinx does not do by itself: contents from the index, the reference from the source, checks of code blocks."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util import logging

import nanoinfer
from nanoinfer.cli.app import COMMANDS, load_command
from nanoinfer.cli.help import TOPICS
from nanoinfer.protocols.fields import REQUIRED, SAMPLING_OF, TABLES
from nanoinfer.sampling_params import MAX_LOGPROBS, SamplingParams
from nanoinfer.server.openapi import request_schema

ROOT = Path(__file__).resolve().parents[2]
CHILDREN = {"course/README": "[0-9]*", "log": "log/*"}
"""Page -> the pages below it, which docs/README.md does not list."""
GROUPS = {"Models": "LLM", "Parameters": "Params", "Streams": "Stream", "Errors": "Error", "Outputs": ""}
"""Heading in the page of the API -> how the names of its classes end."""


def contents() -> str:
    """Return the tables of contents: each section of docs/README.md, the index, is a part of the site."""
    parts = [toctree(["All pages <README>"])]
    for section in re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(), flags=re.M)[1:]:
        title, _, rows = section.partition("\n")
        parts.append(toctree(dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md\)", rows)), f":caption: {title}"))
    return "".join(parts)


def toctree(names: Iterable[str], option: str = "") -> str:
    """Return a hidden table of contents."""
    return "\n".join(["\n```{toctree}", ":hidden:", option, "", *names, "```\n"])


def api() -> str:
    """Return the public names, which autodoc documents from their docstrings."""
    names, parts = list(nanoinfer.__all__), []
    for title, end in GROUPS.items():
        group = [name for name in names if name.endswith(end)]
        names = [name for name in names if name not in group]
        classes = "".join(f".. autoclass:: nanoinfer.{name}\n   :members:\n\n" for name in group)
        parts.append(f"## {title}\n\n```{{eval-rst}}\n{classes}```\n")
    return "\n".join(parts)


def commands() -> str:
    """Return a section for each command: its usage, its examples, its options by topic."""
    parts = []
    for name in COMMANDS:
        command: Any = load_command(name)
        context = click.Context(command, info_name=f"nanoinfer {name}")
        examples = inspect.cleandoc(command.epilog.partition("Examples:\n")[2])
        usage = " ".join([f"nanoinfer {name}", *command.collect_usage_pieces(context)])
        parts.append(f"## nanoinfer {name}\n\n{escape(command.help)}\n\n```text\n{usage}\n```\n")
        parts.append(f"```bash\n{examples}\n```\n\n```{{program}} nanoinfer {name}\n```\n")
        topics: dict[str, list[Any]] = {title: [] for title in ("Arguments", "Options", *TOPICS.values())}
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                topics["Arguments"].append((parameter.metavar, getattr(parameter, "text", "")))
            elif record := parameter.get_help_record(context):
                topics[getattr(parameter, "topic", "Options")].append(record)
        for title, rows in topics.items():
            parts += [f":::{{rubric}} {title}\n:::\n"] if rows else []
            parts += [f":::{{option}} {flag.replace(' / ', ', ')}\n{escape(text)}\n:::\n" for flag, text in rows]
    return "\n".join(parts)


def fields() -> str:
    """Return a table of the fields of each route, from those that the parsers read."""
    parts, shared = [], dict[str, Any]()
    for url, table in TABLES.items():
        defaults = SamplingParams(max_tokens=None) if url in SAMPLING_OF else None
        schemas = request_schema(url, defaults, MAX_LOGPROBS)["properties"]
        ignored = [f"`{name}`" for name in table if not table[name].schema]
        own = {name: schema for name, schema in schemas.items() if name in table and f"`{name}`" not in ignored}
        parts += [f"## {url}\n", table_of(own, REQUIRED[url])]
        parts += [f"Accepted without effect: {', '.join(ignored)}.\n"] if ignored else []
        if defaults is not None:
            shared |= {name: schema for name, schema in schemas.items() if name not in table}
            missing = ", ".join(f"`{name}`" for name in shared if name not in schemas)
            but = f" without {missing}" if missing else ""
            parts.append(f"And the [sampling parameters](#sampling-parameters){but}.\n")
    return "\n".join([*parts, "## Sampling parameters\n", table_of(shared, [])])


def table_of(schemas: Mapping[str, Any], required: list[str]) -> str:
    """Return fields as a table, from their JSON schemas."""
    rows = ["| field | values | what it means |", "|---|---|---|"]
    for name, schema in schemas.items():
        default = schema.get("default") or None  # not [] or False
        text = escape(schema["description"]) + ("" if default is None else f" Default: `{default}`.")
        rows.append(f"| `{name}`{' (required)' if name in required else ''} | {values(schema)} | {text} |")
    return "\n".join([*rows, ""])


def values(schema: Mapping[str, Any]) -> str:
    """Return which values a schema allows, besides null."""
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(values(part) for part in schema["anyOf"] if part != {"type": "null"}))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    kind = schema.get("type", "any")
    kind = kind if isinstance(kind, str) else kind[0]
    limits = [f"{sign} {schema[name]}" for name, sign in (("minimum", "≥"), ("maximum", "≤")) if name in schema]
    return " ".join([kind, ", ".join(limits), f"of: {values(schema['items'])}" if "items" in schema else ""]).strip()


def escape(text: str) -> str:
    """Return plain text as Markdown; what stands between backticks remains code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_\[\]<>{}|])", r"\\\1", p) for p in parts)


def read_docstring(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Read Args and Raises of a docstring. Of an attribute, napoleon takes text before a colon as its type."""
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, obj, options).lines()


def complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Add its table of contents to a page, and what `<!-- from the source: NAME -->` stands for."""
    source[0] += contents() if page == "index" else toctree([CHILDREN[page]], ":glob:") if page in CHILDREN else ""
    for name, function in (("api", api), ("commands", commands), ("fields", fields)):
        if (marker := f"<!-- from the source: {name} -->\n") in source[0]:
            source[0] = source[0].replace(marker, function())


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Let links to files that are no pages lead to the repository: to `source_url`, or else to this folder."""
    folder = Path(app.srcdir, app.env.docname).parent
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        file, anchor = (folder / node["reftarget"]).resolve(), ""
        if node.get("refdomain") == "doc" and node["reftype"] == "myst":  # a page: its name, without .md
            file, anchor = Path(app.srcdir, f"{node['reftarget']}.md"), node["reftargetid"]
        if node["reftype"] == "myst" and node["reftarget"] not in app.env.found_docs and file.exists():
            page = Path(app.outdir, app.builder.get_target_uri(app.env.docname))
            url = app.config.source_url
            place = f"{url}/{file.relative_to(ROOT)}" if url else os.path.relpath(file, page.parent)
            place += f"#{anchor}" if anchor else ""
            node.replace_self(nodes.reference("", "", *node.children, refuri=place))


def name_files(app: Sphinx, doctree: nodes.document) -> None:
    """Name the files of a diff by their paths in the repository, not in the folder in which the site is built."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "udiff":
            text = block.astext().replace(f"{ROOT}/", "")
            block.replace_self(nodes.literal_block(text, text, **block.attributes))


def unknown(text: str) -> list[str]:
    """Return the commands and options in lines of a shell that nanoinfer does not have."""
    names = []
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\\\n", " ", text)  # a quoted value may begin with a dash
    for name, rest in re.findall(r"(?:^|[|;&] )\s*nanoinfer ([a-z]\S*)([^|;&#\n]*)", text, re.M):
        parameters = load_command(name).params if name in COMMANDS else []
        options = {"-h", "--help"}.union(*(p.opts for p in parameters), *(p.secondary_opts for p in parameters))
        names += [option for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest) if option not in options]
        names += [] if name in COMMANDS else [name]
    return names


def error_of(language: str, text: str) -> str:
    """Return what is wrong with a code block: Python compiles, JSON (or each of its lines) parses; "" if nothing is."""
    try:
        if language == "python":
            compile(text, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "json":
            [json.loads(value) for value in (text.splitlines() if "\n{" in text else [text])]
    except (SyntaxError, ValueError) as e:
        return f"{language}: {e}"
    names = unknown(text.replace("\n$ ", "\n")) if language in ("bash", "sh", "console") else []
    return f"nanoinfer does not have {', '.join(names)}" if names else ""


def check(app: Sphinx, doctree: nodes.document) -> None:
    """Warn of what is wrong with the code and the commands of a page. The log has those of older versions."""
    found = [(b, error_of(b.get("language", ""), b.astext())) for b in doctree.findall(nodes.literal_block)]
    found += [(code, error_of("sh", code.astext())) for code in doctree.findall(nodes.literal)]
    for node, error in found if not app.env.docname.startswith("log") else []:
        if error and "source" not in node:  # with a source, it is a part of a file
            logging.getLogger(__name__).warning(error, location=node)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx. A diagram in Mermaid is shown as its text."""
    app.add_config_value("source_url", "", "env")
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("doctree-read", link_files, priority=100)  # before Sphinx collects the files to copy
    app.connect("doctree-read", name_files)
    app.connect("doctree-read", check)
    return {"parallel_read_safe": True}
