#!/usr/bin/env bash
# Draws the pictures of make see in the handouts of labs 4 to 6 again: see_lab04.png, see_lab05.png, see_lab06.png.
#
#     labs/figures/see.sh [DIR]        into DIR (default: labs/figures)
#
# Of labs 4 and 6 only a request, since the source beside it would be an answer. Needs g++, python3 and chromium.
set -eu
unset CDPATH
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-labs/figures}" && cd "${1:-labs/figures}" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# draw LAB KERNEL ROW WIDTH HEIGHT HIDDEN: row ROW of the page, chosen; HIDDEN: CSS selectors of what is left out
draw() {
    make -s see "LAB=$1" "KERNEL=$2" "PAGE=$tmp/page.html" >/dev/null
    python3 - "$tmp" "$3" "$6" <<'END'
import html, sys
folder, row, hidden = sys.argv[1:]
with open(folder + "/page.html", encoding="utf-8") as page:
    text = html.escape(page.read())
with open(folder + "/frame.html", "w", encoding="utf-8") as frame:
    frame.write(f"""<!DOCTYPE html>
<style>body {{ margin: 0 }} iframe {{ border: 0; width: 100vw; height: 100vh }}</style>
<iframe srcdoc="{text}"></iframe><script>onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  page.querySelector('[data-op="{row}"]').click();
  for (const e of page.querySelectorAll("{hidden}")) e.style.display = "none";
}}</script>""")
END
    env HOME="$tmp/home" timeout -k 5 120 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
        --hide-scrollbars --window-size="$4,$5" --screenshot="$out/see_lab0$1.png" "$tmp/frame.html" >/dev/null 2>&1
    echo "drawn: $out/see_lab0$1.png"
}

draw 4 bias_kernel 1 640 330 'h1, h1 ~ details, #compare, .scroll, h2, section > p, .frames'
draw 5 naive_kernel 0 800 700 'h1, h1 ~ details, #compare, h2'
draw 6 conv2d_data_gradient_naive_kernel 0 640 330 'h1, h1 ~ details, #compare, .scroll, h2, section > p, .frames'
