"""For test_report.sh: report_page.py pictures DIR | check DIR | frames DIR PAGE

pictures writes hostile things into DIR, whose report.md then names them; check prints what is wrong with
DIR/report.html, one line each; frames writes PAGE, which measures report.html in a browser that is 390 px wide, as it
is, without its policy, and as printed: its first <pre> is in JSON what measured() below returns for each.
"""
import base64
import html
import os
import re
import struct
import sys
import zlib
from html.parser import HTMLParser

VOID = {"meta", "hr", "br", "img"}
TAGS = VOID | set("html head title style body h1 h2 h3 p a em strong s code pre ul ol li blockquote span div "
                  "table thead tbody tr th td".split())
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "href", "title", "src", "alt", "start"}
POLICY = {"http-equiv": "Content-Security-Policy",
          "content": "default-src 'none'; img-src data:; style-src 'unsafe-inline'"}
SCRIPT = """
function measured(frame) {
  const page = frame.contentDocument, edge = page.documentElement
  return {width: frame.contentWindow.innerWidth, needs: edge.scrollWidth,
          pictures: Array.from(page.images, i => i.naturalWidth), title: page.title,
          requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name)}
}
onload = () => document.querySelector("pre").textContent =
  JSON.stringify(Array.from(document.querySelectorAll("iframe"), measured))
"""
HOSTILE = """
The list follows without a blank line:
- one
- two

> TODO: a question
> of two lines?

<script>document.title = "hostile"</script>
<img src="https://example.org/a.png" onerror="document.title = 'hostile'"> <iframe src="https://example.org"></iframe>
<style>@import "https://example.org/a.css"</style><link rel="stylesheet" href="https://example.org/a.css">

A [link](https://example.org), [script](javascript:document.title='hostile'), [other](JAVAscript&colon;alert),
[data](data:text/html;base64,PHNjcmlwdD4=). <!-- a private remark --> `<!-- code -->` stays.

![wide](plots/wide.png)
![quoted" onerror="document.title='hostile'](plots/wide.png "a" )
![remote](https://example.org/a.png)
![remote](//example.org/a.png)
![outside](../../../../../../etc/passwd)
![outside](/etc/passwd)
![outside](plots/link.png)
![outside](elsewhere/outside.png)
![drawing](plots/drawing.svg)
![text](plots/text.png)
![large](plots/large.png)
![gone](plots/gone.png)
![folder](plots)

```x"><script>document.title="hostile"</script>
<!-- a comment in code --> LONG
```

LONG

| LONG | number |
| --- | --- |
| `a\\|b` | 12.5 |
| c | 7 |
"""


def png(width, height, gray):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    rows = zlib.compress((b"\0" + bytes([gray]) * width) * height)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def pictures(root):
    def save(name, data):
        with open(os.path.join(root, name), "wb") as f:
            f.write(data)
    os.makedirs(f"{root}/plots")
    os.makedirs(f"{root}-elsewhere")
    for name in ("study", "loss", "wide"):
        save(f"plots/{name}.png", png(2000, 60, 128))
    save("../" + os.path.basename(root) + "-elsewhere/outside.png", png(20, 20, 77))
    os.symlink(f"../../{os.path.basename(root)}-elsewhere/outside.png", f"{root}/plots/link.png")
    os.symlink(f"../{os.path.basename(root)}-elsewhere", f"{root}/elsewhere")
    save("plots/drawing.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    save("plots/text.png", b"GIF, it is not")
    save("plots/large.png", png(1, 1, 0) + bytes(8 << 20))
    with open(f"{root}/report.md", "a", encoding="utf-8") as f:
        f.write(HOSTILE.replace("LONG", "/a/very/long/" + "word" * 40))


class Page(HTMLParser):
    """Collects what is wrong, and the pictures."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.pictures, self.order = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.order.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag not in TAGS:
            self.wrong.append(f"the element {tag}")
        for name, value in attrs:
            if name not in ATTRIBUTES:
                self.wrong.append(f"the attribute {name}")
            if name == "src" and not re.match("data:image/(png|jpeg|gif|webp);base64,", value):
                self.wrong.append(f"the source {value[:60]}")
            if name == "href" and not (tag == "a" and re.match("https?://|mailto:|#|[^:]*$", value)):
                self.wrong.append(f"the link {value}")
        if tag == "img":
            self.pictures.append(dict(attrs))
        if self.order == ["html", "head", "meta"] and tag == "meta" and dict(attrs) != POLICY:
            self.wrong.append("no policy as the first element of head")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> in line {self.getpos()[0]}")

    def handle_data(self, data):
        if self.open[-1:] == ["style"] and re.search("url|import|//", data):
            self.wrong.append("a request in the style sheet")


def check(root):
    with open(f"{root}/report.html", encoding="utf-8") as f:
        text = f.read()
    page = Page()
    page.feed(text)
    page.close()
    wrong = page.wrong + [f"<{tag}> without end" for tag in page.open]
    if page.order[:3] != ["html", "head", "meta"]:
        wrong.append(f"{page.order[:3]} at the beginning")
    with open(f"{root}/report_full.md", encoding="utf-8") as f:
        named = re.findall(r"^!\[([^\]]*)\]\(([^ )]*)", f.read(), re.M)
    absent = len(re.findall('class="absent"', text))
    if len(named) != len(page.pictures) + absent:
        wrong.append(f"{len(page.pictures)} pictures and {absent} notes for {len(named)} in report_full.md")
    inside = [base64.b64decode(p["src"].partition(",")[2]) for p in page.pictures]
    shown = [(shows, name) for shows, name in named if f'alt="{html.escape(shows)}"' in text]
    for picture, (shows, name) in zip(inside, shown):
        with open(os.path.join(root, name), "rb") as f:
            if f.read() != picture:
                wrong.append(f"another picture in place of {name} ({shows})")
    print(*wrong, sep="\n", end="\n" * bool(wrong))


def frames(root, path):
    with open(f"{root}/report.html", encoding="utf-8") as f:
        text = f.read()
    frame = '<iframe width="390" height="800" style="border: 0" srcdoc="{}"></iframe>'
    with open(path, "w", encoding="utf-8") as f:
        f.write("<!DOCTYPE html><pre></pre>" + "".join(
            frame.format(html.escape(page)) for page in (text, re.sub("<meta http-equiv[^>]*>", "", text),
                                                         text.replace("@media print", "@media all")))
            + f"<script>{SCRIPT}</script>")


if __name__ == "__main__":
    {"pictures": pictures, "check": check, "frames": frames}[sys.argv[1]](*sys.argv[2:])
