"""A real Chromium for the tests of pages, and visits that remember what went wrong."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.ui.live.server import LivePage, open_page

__all__ = ["CHROMIUM", "Visit", "Visits", "browser", "live", "needs_chromium", "visit"]


CHROMIUM = Path(os.environ.get("ROOKERY_CHROMIUM", "/usr/bin/chromium"))
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
needs_chromium = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no Chromium at {CHROMIUM}: set ROOKERY_CHROMIUM"
)


class Visit:
    """A page that remembers what went wrong and what it asked for."""

    def __init__(self, browser: Any, url: str, place: str = "", **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.origin = url.partition("?")[0]
        self.begun = time.monotonic()
        self.page.goto(url + place)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def go(self, place: str) -> None:
        """To another view of the same page; what is seen then is not of the view before."""
        self.page.evaluate("document.querySelectorAll('.tab-body').forEach((old) => old.remove())")
        self.page.goto(self.origin + place)

    def see(self, selector: str, *, text: str = "") -> Any:
        found = self.page.locator(selector).filter(has_text=text).first
        found.wait_for(state="visible", timeout=20_000)
        return found

    def check(self) -> None:
        """What is looked at fits, no text made markup of itself, and nothing went wrong."""
        root = "document.documentElement"
        assert not self.page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"), "too wide"
        assert self.page.locator("img").count() == 0
        assert self.complaints == []

    def close(self) -> None:
        self.check()
        self.context.close()
        assert self.complaints == []
        assert all(url.startswith(self.origin) for url in self.requests if url[:5] != "data:")


Visits = Callable[..., Visit]
"""How a visit is begun: with what a visit takes after its browser."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for the session: while it is there, no test of its process can run an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visits]:
    """Opens visits, which are checked at the end of the test unless they were closed."""
    opened: list[Visit] = []

    def begin(url: str, place: str = "", **options: Any) -> Visit:
        opened.append(Visit(browser, url, place, **options))
        return opened[-1]

    yield begin
    for one in opened:
        if one.context.pages:
            one.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePage]:
    """The page of the runs in the folder of the test; named before `visit`, it ends after it."""
    with open_page(tmp_path, port=0) as page:
        yield page
