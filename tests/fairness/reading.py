"""Reads pages as a browser does, as far as tests ask."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "hr", "link", "input"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_TELLS = """<script>
addEventListener("load", () => parent.postMessage(
  [document.documentElement.scrollWidth, innerWidth,
   Math.max(...[...document.querySelectorAll(".wide")].map(box => box.scrollWidth))], "*"));
</script></body>"""
_FRAME = """<!doctype html><title>-</title>
<iframe src="{name}" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>addEventListener("message", told => document.title = told.data.join(" "));</script>"""


class Reader(HTMLParser):
    """Tags that are balanced, or an error; every element's attributes; texts outside of <style>."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.inside: dict[int, list[str]] = {}
        """Of an element's number, the tags around it."""
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.feed(page)
        self.close()
        assert not self.opened, f"left open: {self.opened}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside[len(self.elements)] = list(self.opened)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened, f"</{tag}> closes nothing"
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.opened:
            self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def check_page(page: str) -> Reader:
    """A page that needs no network and no script, and that everybody can read."""
    found = Reader(page)
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "iframe", "object", "embed", "link", "base", "form"}
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:").startswith("data:image/png;base64,") or (
            "src" not in attributes
        )
        target = attributes.get("href", f"#{ids[0]}" if ids else "#")
        assert target == "#" or target[1:] in ids
    assert "url(" not in page.split("</style>")[0]
    assert "@import" not in page
    assert found.of("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in found.of("meta")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in found.of(
        "meta"
    )
    assert all(image["alt"].strip() for image in found.of("img"))
    for number, (tag, _) in enumerate(found.elements):
        if tag == "table":
            box = max(i for i, (name, _) in enumerate(found.elements[:number]) if name == "div")
            assert found.elements[box][1] == {"class": "wide", "tabindex": "0"}
            assert "div" in found.inside[number]
    assert all(cell.get("scope") == "col" for cell in found.of("th"))
    return found


def widths(path: Path, width: int) -> tuple[int, int, int]:
    """Of a page in a window of so many pixels: its own width, the window's, its widest box's content."""
    assert CHROMIUM is not None
    copy = path.with_name("copy.html")
    copy.write_text(path.read_text().replace("</body>", _TELLS))
    around = path.with_name("around.html")
    around.write_text(_FRAME.format(name=copy.name, width=width))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
         f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", around.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = done.stdout.split("<title>")[1].split("</title>")[0]
    page, window, box = map(int, title.split())
    return page, window, box
