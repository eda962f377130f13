"""Pictures of a report as a browser shows it, light and dark side by side; needs chromium and Pillow.

python tools/screenshots.py REPORT.html OUT.png [--width 1000] [--height 1600]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
THEMES = {"light": ("--blink-settings=preferredColorScheme=1",), "dark": ("--blink-settings=preferredColorScheme=0",)}


def shot(browser: str, page: Path, theme: str, size: tuple[int, int], folder: Path) -> Image.Image:
    """The top of a page in a window of that size."""
    path = folder / f"{theme}.png"
    window = (f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder / theme}", f"--screenshot={path}")
    command = [browser, *FLAGS, *THEMES[theme], *window, page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return Image.open(path).convert("RGB")


def main() -> int:
    """Takes both pictures and puts them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=1600)
    asked = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("there is no chromium: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        size = (asked.width, asked.height)
        both = [shot(browser, asked.report, theme, size, Path(folder)) for theme in THEMES]
    whole = Image.new("RGB", (2 * asked.width, asked.height))
    for place, picture in enumerate(both):
        whole.paste(picture, (place * asked.width, 0))
    whole.quantize(96).save(asked.output, optimize=True)
    print(f"{asked.output}: {asked.output.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
