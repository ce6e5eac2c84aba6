"""``python -m lastlayer`` is the command ``lastlayer``."""

from lastlayer.cli import main

main()
