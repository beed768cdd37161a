"""Makes report.html from the text of report_full.md: a single file with its pictures inside, for phones and printers.

Whoever opens it need not trust who wrote report.md: HTML in it is shown as text, scripts and requests are
forbidden by the page's policy, and only pictures below the folder of the report are embedded. Needs
markdown-it-py: pip install -r labs/requirements.txt, or on Debian apt-get install python3-markdown-it.
"""
import base64
import html
import os
import re
from urllib.parse import unquote

from markdown_it import MarkdownIt

LARGEST = 8 << 20  # bytes of a picture
LONG = 30  # characters of a cell that needs room
# A file is what its first bytes say, whatever its name.
KINDS = {rb"\x89PNG\r\n\x1a\n": "png", rb"\xff\xd8\xff": "jpeg", rb"GIF8[79]a": "gif", rb"RIFF....WEBP": "webp"}
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?%)?")
# What begins a block of code, code in a line, or a comment
BEGIN = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})|(?P<ticks>`+)|<!--", re.M)

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}</body>
</html>
"""
STYLE = """\
:root { color-scheme: light }
body { max-width: 50em; margin: 0 auto; padding: 1em; background: #fff; color: #1a1a1a;
  font: 1em/1.5 sans-serif; overflow-wrap: anywhere }
h1, h2, h3 { line-height: 1.25; margin: 1.6em 0 .5em }
h1 { font-size: 1.5em; border-bottom: 1px solid #bbb } h2 { font-size: 1.2em } h3 { font-size: 1em }
a { color: #0645ad }
img { max-width: 100%; height: auto }
pre, code { background: #f3f3f3; font-family: monospace; font-size: .92em }
pre { padding: .6em .8em; white-space: pre-wrap }
pre code { font-size: 1em }
.table { overflow-x: auto; margin: 1em 0 }
table { border-collapse: collapse; font-size: .8em; line-height: 1.3; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #bbb; padding: .25em .4em; text-align: left; vertical-align: top;
  overflow-wrap: normal }
th { background: #f3f3f3 }
.number { text-align: right }
.long { min-width: 16em }
blockquote { margin: 1em 0; padding: .1em 1em; border-left: 4px solid #bbb }
.todo, .absent { background: #fff3cd; border-left: 4px solid #b37700 }
.absent { display: block; padding: .5em 1em }
@media (max-width: 30em) {
  table { font-size: .72em }
  th, td { padding: .2em .25em }
  .long { min-width: 10em }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt }
  h1, h2, h3, p:has(+ .table) { break-after: avoid }
  tr, img, .table, .absent { break-inside: avoid }
  thead { display: table-header-group }
  p, li, blockquote { orphans: 3; widows: 3 }
  img { max-height: 12cm }
  .table { overflow-x: visible }
  table { font-size: 7pt }
  th, td { padding: .15em .3em; overflow-wrap: anywhere } /* a wide table is not cut off */
  .long { min-width: 0 }
}
"""


class Absent(Exception):
    """A picture that is not embedded; the message says why and what to do."""


def read_picture(root, name):
    """The data: URI of a picture in the folder root or below it."""
    if re.match("(?i)[a-z][a-z0-9+.-]*:|//", name):
        raise Absent("it is a web address; save it beside report.md and write the file's name")
    folder = os.path.realpath(root)
    path = os.path.realpath(os.path.join(folder, name))
    if os.path.commonpath([folder, path]) != folder:
        raise Absent("it is outside of the report's folder; copy it there")
    if not os.path.isfile(path):
        raise Absent("there is no such file; make report draws plots, where Python has matplotlib")
    if os.path.getsize(path) > LARGEST:
        raise Absent(f"it has more than {LARGEST >> 20} MiB; make it smaller")
    with open(path, "rb") as f:
        data = f.read()
    for begin, kind in KINDS.items():
        if re.match(begin, data, re.S):
            return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    raise Absent("it is not a PNG, JPEG, GIF or WebP file; convert it to one")


def render_picture(self, tokens, at, options, env):
    """Embedded, or a note in its place, which env["absent"] collects; env["root"] is the report's folder."""
    name, shows = unquote(tokens[at].attrGet("src") or ""), html.escape(tokens[at].content)
    try:
        return f'<img src="{read_picture(env["root"], name)}" alt="{shows}">'
    except (Absent, OSError, ValueError) as why:
        shown = "".join(c if c.isprintable() else "?" for c in name)
        note = f"the picture {shown} is not in this page: {why}"
        env["absent"].append(note)
        return f'<span class="absent">{html.escape(note[0].upper() + note[1:])} ({shows})</span>'


def mark_questions(tokens):
    for begin, _, text in zip(tokens, tokens[1:], tokens[2:]):
        if begin.type == "blockquote_open" and text.content.startswith("TODO:"):
            begin.attrSet("class", "todo")


def lay_out_tables(tokens):
    """Columns of numbers are aligned to the right; cells of more than a few words are not squeezed."""
    table, row = [], []
    for at, cell in enumerate(tokens):
        if cell.type in ("th_open", "td_open"):
            row.append((cell, tokens[at + 1].content.strip()))
            if len(row[-1][1]) > LONG:
                cell.attrSet("class", "long")
        elif cell.type == "tr_close":
            table, row = table + [row], []
        elif cell.type == "table_close":
            for column in zip(*table):
                words = [word for _, word in column[1:] if word]
                if words and all(map(NUMBER.fullmatch, words)):
                    for other, _ in column:
                        other.attrSet("class", "number")
            table = []


def end_of(text, begin):
    """Where the code or comment that begins there ends; -1 if it does not."""
    if begin["fence"]:
        at = text.find("\n" + begin["fence"], begin.end())
        return at if at < 0 else at + 1 + len(begin["fence"])
    if begin["ticks"]:
        at = text.find(begin["ticks"], begin.end())
        on_this_line = at >= 0 and "\n" not in text[begin.end():at]
        return at + len(begin["ticks"]) if on_this_line else begin.end()
    at = text.find("-->", begin.end())
    return at if at < 0 else at + len("-->")


def without_comments(text):
    """Code stays, comments go. What has no end goes on to the last line,
    so nothing is searched twice."""
    kept, at = [], 0
    while begin := BEGIN.search(text, at):
        end = end_of(text, begin)
        if end < 0:
            break
        is_code = begin["fence"] or begin["ticks"]
        kept.append(text[at:end if is_code else begin.start()])
        at = end
    return "".join(kept) + text[at:]


def make_page(root, text):
    """The page, and notes about pictures that it lacks."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    markdown.add_render_rule("image", render_picture)
    markdown.add_render_rule("table_open", lambda *_: '<div class="table"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = markdown.parse(without_comments(text))
    mark_questions(tokens)
    lay_out_tables(tokens)
    titles = (words.content for begin, words in zip(tokens, tokens[1:]) if begin.type == "heading_open")
    env = {"root": root, "absent": []}
    body = markdown.renderer.render(tokens, markdown.options, env)
    page = PAGE.format(policy=POLICY, title=html.escape(next(titles, "Report")), style=STYLE, body=body)
    return page, env["absent"]
