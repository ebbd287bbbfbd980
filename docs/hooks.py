"""The parts of the site that are outside of this folder: README, CONTRIBUTING and CHANGELOG (mkdocs.yml)."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's first folder -> their names in the site."""

SOURCES = "deploy|examples|src|tests"
"""Folders that are no part of the site: a link to a file there becomes its text."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are outside of the folder, with their links as they are from here."""
    for name, page in OUTSIDE.items():
        content = (ROOT / name).read_text(encoding="utf-8")
        content = content.replace("](docs/", "](").replace("see [LICENSE](LICENSE)", "see the file LICENSE")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the outside pages to their copies in the site, and links to sources nowhere."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(rf"\[([^\]]+)\]\((?:\.\./)*(?:{SOURCES})/[^)]*\)", r"\1", markdown)
    for name, copy in OUTSIDE.items():
        markdown = re.sub(rf"\]\((\.\./)*{re.escape(name)}", f"]({up}{copy}", markdown)
    return markdown
