"""``python -m lastlayer`` is the command ``lastlayer``."""

from lastlayer.cli import main

if __name__ == "__main__":
    main()
