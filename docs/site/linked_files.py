"""A hook of the site: files of the repository that a page links to are part of it, as they are.

Pages link to `../examples/x.py` and the like, which is right where the repository is read. In the site
such a file lies under `files/`; a folder, which has no page, is named without a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Every file outside docs/ that a page links to."""
    for page in list(files.documentation_pages()):
        for _, link, _ in LINK.findall(Path(page.abs_src_path).read_text()):
            target = (Path(page.abs_src_path).parent / link).resolve()
            if _outside(target) and target.is_file():
                _add(files, config, target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of this page to such files."""
    folder = Path(page.file.abs_src_path).parent
    up = "../" * page.file.src_uri.count("/")

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not _outside(target):
            return found[0]
        if not target.is_file():
            return found[1]
        return f"[{found[1]}]({up}{_place(target)})"

    return LINK.sub(replaced, markdown)


def _outside(target: Path) -> bool:
    return ROOT in target.parents and ROOT / "docs" not in target.parents


def _place(target: Path) -> str:
    """In the site: text is shown as text, also where it is Markdown."""
    inside = target.relative_to(ROOT).as_posix()
    return f"files/{inside}" + (".txt" if target.suffix in (".md", ".py") else "")


def _add(files: Any, config: Any, target: Path) -> None:
    if files.get_file_from_path(_place(target)) is None:
        files.append(File.generated(config, _place(target), content=target.read_bytes()))
