"""`python -m infra.docs` writes the pages of the reference that are made from the code."""

from pathlib import Path

from infra.docs import command_line, settings

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES = {"command-line.md": command_line.page, "settings.md": settings.page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
