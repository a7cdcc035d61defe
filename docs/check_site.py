"""Check a built site offline: `mkdocs build -d site && python docs/check_site.py site`.

Every link within it leads somewhere; no page is wider than a phone; on a screen of 1,280 pixels no block of code and no
table scrolls sideways. The last two need Chromium.
"""

import contextlib
import functools
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

PHONE, SCREEN = 390, 1280  # pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = """<body><script>
async function within(page, width, found) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const all = frame.contentDocument;
  for (const folded of all.querySelectorAll("details")) folded.open = true;
  const said = found(all);
  frame.remove();
  return said;
}
const widest = all => all.documentElement.scrollWidth;
const scrolling = all => [...all.querySelectorAll("pre > code, .md-typeset__scrollwrap, .md-typeset__table")]
  .filter(part => part.scrollWidth > part.clientWidth + 1)
  .map(part => `${part.scrollWidth} of ${part.clientWidth} pixels: ${part.textContent.trim().slice(0, 60)}`);
(async () => {
  const found = [];
  for (const page of PAGES) {
    const width = await within(page, PHONE, widest);
    if (width > PHONE) found.push(`${page}: ${width} pixels wide on a phone`);
    for (const part of await within(page, SCREEN, scrolling)) found.push(`${page}: scrolls sideways: ${part}`);
  }
  await fetch("/widths", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class _Page(HTMLParser):
    """The links of a page and the names that a link may end with."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        self.links += [value for key in ("href", "src") if (value := given.get(key))]


def broken_links(site: Path) -> list[str]:
    """Links of a site to what is not in it, each as `PAGE: LINK`. Those to other sites are not looked at."""
    pages = {path.relative_to(site).as_posix(): _Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    found = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(urljoin(f"http://site/{name}", link))
            if parts.netloc != "site" or parts.scheme != "http":
                continue
            path = unquote(parts.path).lstrip("/")
            path += "index.html" if path.endswith("/") or not path else ""
            there = path in pages and unquote(parts.fragment) in pages[path].anchors
            if not there and (path in pages or not (site / path).is_file()) and name != "404.html":
                found.append(f"{name}: {link}")
    return found


@contextlib.contextmanager
def _served(site: Path, found: "queue.Queue[list[str]]") -> Iterator[str]:
    """Serve a site, with the page that measures all others; what it finds is put into the queue."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    numbers = f"const PHONE = {PHONE}, SCREEN = {SCREEN}, PAGES = {json.dumps(pages)};"
    measuring = WIDTHS.replace("<script>", f"<script>{numbers}").encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/widths":
                return super().do_GET()
            self._answer(measuring)

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/widths"
    finally:
        server.shutdown()


def wide_pages(site: Path, timeout_s: float = 300) -> list[str]:
    """What is too wide: pages on a phone, blocks of code and tables on a screen, each as `PAGE: WHAT`.

    Raises:
        RuntimeError: There is no browser, or it measured no pages in that time.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"none of {', '.join(BROWSERS)} is installed")
    found: queue.Queue[list[str]] = queue.Queue()
    with _served(site, found) as address, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command = [browser, *options, f"--user-data-dir={profile}", address]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            try:
                return found.get(timeout=timeout_s)
            except queue.Empty:
                raise RuntimeError(f"{browser} measured no pages in {timeout_s:g} s") from None
            finally:
                running.kill()


def main() -> None:
    """Write what is wrong, and exit with 1 if anything is."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    found = [f"broken link: {line}" for line in broken_links(site)]
    found += wide_pages(site)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
