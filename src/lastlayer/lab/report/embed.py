"""Text inside HTML: data that no browser can take for markup, and which scripts may run."""

import base64
import hashlib
import json
from typing import Any

from markupsafe import Markup

# Inside <script> only these could end it, open a comment, or end a line of older JavaScript.
_ESCAPES = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def json_for_script(value: Any) -> Markup:
    r"""JSON for a ``<script type="application/json">``, the same value and without any markup.

    Example:
        >>> print(json_for_script({"token": "</script>"}))
        {"token":"\u003c/script\u003e"}
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate is no text: a file could not be written with it.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return Markup(text.translate(_ESCAPES))


def script_hash(code: str) -> str:
    """What a content security policy knows an inline script by."""
    digest = hashlib.sha256(code.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def content_policy(scripts: list[str]) -> str:
    """Only these scripts run, and nothing is ever fetched."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(script_hash(code) for code in scripts)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
