"""For test_see.sh: see_page.py PAGE FRAME | judge PAGE

The first writes FRAME, a page that shows PAGE in a browser, 390 px wide, clicks through it, and writes what it found as
JSON into its <pre>. The second reads that and prints what is wrong with it, a line each.
"""
import html
import json
import re
import sys

SCRIPT = """
const frame = document.querySelector("iframe"), found = {runs: []};
function press(page, element, key) {
  element.dispatchEvent(new (page.defaultView.KeyboardEvent)("keydown", {key, bubbles: true, cancelable: true}));
}
const text = (root, selector) => root.querySelector(selector).textContent;
// All requests of a row, as the page draws them: sectors, or passes
function drawn(page, root, row) {
  const sums = {sectors: 0, passes: 0, conflicts: 0, requests: 0, on: 0};
  row.click();
  const stepTo = (bar, label) => root.querySelector(bar + ' button[aria-label="' + label + '"]');
  while (!stepTo(".frames", "previous frame").disabled) stepTo(".frames", "previous frame").click();
  for (;;) {
    const warps = root.querySelectorAll("select option").length;
    for (let warp = 0; warp < warps; warp++) {
      const select = root.querySelector("select");
      select.value = warp;
      select.dispatchEvent(new (page.defaultView.Event)("change", {bubbles: true}));
      for (;;) {
        const verdict = root.querySelector(".verdict");
        if (!verdict) break;
        sums.requests++;
        for (const name of ["sectors", "passes", "conflicts"]) sums[name] += Number(verdict.dataset[name] || 0);
        sums.on += root.querySelectorAll(".warp.chosen .on").length;
        if (stepTo(".requests", "next request").disabled) break;
        stepTo(".requests", "next request").click();
      }
    }
    if (stepTo(".frames", "next frame").disabled) break;
    stepTo(".frames", "next frame").click();
  }
  return sums;
}
onload = () => {
  const page = frame.contentDocument, window = frame.contentWindow;
  found.width = window.innerWidth;
  found.needs = page.documentElement.scrollWidth;
  found.requests = window.performance.getEntriesByType("resource").map(entry => entry.name);
  for (const root of page.querySelectorAll("section")) {
    const run = {rows: [], hazards: root.querySelectorAll(".hazard").length};
    const rows = [...root.querySelectorAll("tr.op")];
    for (const row of rows) run.rows[Number(row.dataset.op)] = drawn(page, root, row);
    rows[0].click();
    press(page, rows[0], "ArrowDown");
    run.second_row = rows[1].getAttribute("aria-selected") + page.activeElement.dataset.op;
    const before = text(root, ".requests .text");
    press(page, rows[1], "w");
    run.warp = [before, text(root, ".requests .text")];
    press(page, rows[1], "W");
    const first = text(root, ".frames .text");
    press(page, rows[1], "]");
    run.frame = [first, text(root, ".frames .text")];
    press(page, rows[1], "[");
    run.arrows = root.querySelectorAll(".arrow").length;
    found.runs.push(run);
  }
  found.needs_after = page.documentElement.scrollWidth;
  document.getElementById("measured").textContent = JSON.stringify(found);
};
"""


def data_of(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return text, json.loads(re.search(r'id="runs">(.*?)</script>', text, re.S)[1])


def write_frame(page, path):
    text, _ = data_of(page)
    with open(path, "w", encoding="utf-8") as file:
        file.write('<!DOCTYPE html><pre id="measured"></pre><iframe width="390" height="800" style="border: 0" srcdoc="'
                   f'{html.escape(text)}"></iframe><script>{SCRIPT}</script>')


def judge(page):
    _, runs = data_of(page)
    found = json.loads(html.unescape(sys.stdin.read()))

    def expect(what, expected, got):
        if expected != got:
            print(f"{what}: expected {expected}, found {got}")

    expect("width", [390, 390, 390], [found["width"], found["needs"], found["needs_after"]])
    expect("requests to the network", [], found["requests"])
    expect("runs", len(runs), len(found["runs"]))
    for number, (run, shown) in enumerate(zip(runs, found["runs"])):
        for i, (op, row) in enumerate(zip(run["ops"], shown["rows"])):
            of = f"run {number}, row {i}, "
            for name in ("requests", "sectors", "passes"):
                expect(of + name, op.get(name, 0), row[name])
            expect(of + "conflicts", op.get("passes", 0) - op.get("least", 0), row["conflicts"])
            expect(of + "lanes on", op["lanes"], row["on"])
        order = sorted(range(len(run["ops"])), key=lambda i: run["ops"][i]["line"])
        expect(f"run {number}, the row that Down chooses", f"true{order[1]}", shown["second_row"])
        expect(f"run {number}, warps", ["Warp 0", "Warp 1"], [text.split(",")[0] for text in shown["warp"]])
        expect(f"run {number}, frames", ["Frame 1 of 2", "Frame 2 of 2"], [t.split(":")[0] for t in shown["frame"]])
        expect(f"run {number}, hazards", len(run["hazards"]), shown["hazards"])
        pairs = sum(len(h["pairs"]) for h in run["hazards"] if h["frame"] == 0)
        expect(f"run {number}, arrows", min(pairs, 8), shown["arrows"])


if sys.argv[1] == "judge":
    judge(sys.argv[2])
else:
    write_frame(sys.argv[1], sys.argv[2])
