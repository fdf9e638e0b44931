"""The browser in which pages are checked."""

import os
import shutil
import sys


def launch(playwright):
    """Starts Chromium: the program that CHROMIUM names, or the one on the path."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        sys.exit("error: there is no chromium: install Debian's package chromium, or name it in CHROMIUM")
    return playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
