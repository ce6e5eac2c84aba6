"""Takes the screenshot of a report for the documentation.

python docs/photograph.py runs/demo/report.html docs/_static/lab-page.png
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = {"desktop": (1280, 1180), "phone": (390, 844)}
READY = "[...document.querySelectorAll('.chart')].every(c => c.dataset.ready === 'true')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", choices=WIDTHS, default="desktop")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page, not only its top")
    chosen = parser.parse_args()
    width, height = WIDTHS[chosen.size]
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if chosen.dark else "light",
            device_scale_factor=1.5,
        )
        page.goto(chosen.page.resolve().as_uri())
        page.wait_for_function(READY)
        page.screenshot(path=chosen.picture, full_page=chosen.whole)
        browser.close()


if __name__ == "__main__":
    main()
