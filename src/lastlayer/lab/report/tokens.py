"""Tokens as a reader can see them: what is blank, unseen or turns text around is named."""

import unicodedata

LONGEST = 40
_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\N{NO-BREAK SPACE}": "⍽", "\x7f": "␡"}
# Control, format, surrogate, private and unassigned characters, and separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
EMPTY = "∅"


def visible(token: object, longest: int = LONGEST) -> str:
    r"""The token with a sign for each character that would not be seen.

    Example:
        >>> visible("a b\n"), visible(""), visible("\u200b"), visible("x" * 50, 5)
        ('a␣b⏎', '∅', '⟨U+200B⟩', 'xxxx…')
    """
    text = str(token)
    if not text:
        return EMPTY
    shown = "".join(_shown(c) for c in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if unicodedata.category(character) in _UNSEEN:
        return f"⟨U+{ord(character):04X}⟩"
    if unicodedata.combining(character):
        return "◌" + character
    return character
