"""Make one self-contained page of a template: no requests, nothing that could run but its script.

Everything from outside is escaped by the template engine. Should something slip through all the
same, the page's content security policy names the hash of its one script and its one style, so that
a browser runs and fetches nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from paralign.align.report.numbers import seconds, short

_FOLDER = "templates"


def render_page(template: str, *, scripts: Sequence[str], **values: Any) -> str:
    """Fill a template that extends ``base.html.j2``.

    Args:
        template: Its file name.
        scripts: File names of what makes up the page's one script.
        values: What the template shows; ``data``, if there is any, is what the script reads.
    """
    style = _text("page.css")
    code = "\n".join(map(_text, ("common.js", *scripts)))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("paralign.align.report", _FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(short=short, seconds=seconds, breakable=breakable)
    page = environment.get_template(template).render(
        policy=_policy(style, code),
        style=Markup(style),
        script=Markup(code),
        **values,
    )
    # A name may hold half a character, which no file can.
    return page.encode("utf-8", "replace").decode("utf-8")


def breakable(name: str) -> Markup:
    """Let a long dotted name break after its dots and underscores."""
    escaped = str(Markup.escape(name))
    return Markup(escaped.replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _text(name: str) -> str:
    text = resources.files("paralign.align.report").joinpath(_FOLDER, name).read_text("utf-8")
    assert "</" not in text, f"{name} would end the element that it is in"
    return text


def _policy(style: str, code: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(code)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
