#!/usr/bin/env bash
# comment_density.sh FILE...: how many of the lines of these C files hold a comment, for each file and
# together. A line counts once, whether the comment stands alone or behind code; an empty line never.
set -u
export LC_ALL=C
[ $# -gt 0 ] || { echo "usage: tests/source/comment_density.sh FILE..." >&2; exit 2; }

awk '
    # Returns whether the line holds a comment. inside: it begins within a /* comment.
    function has_comment(line,    found, c, two, quote) {
        found = inside && line ~ /[^ \t]/
        while (line != "") {
            two = substr(line, 1, 2)
            if (inside) {
                c = index(line, "*/")
                inside = c == 0
                line = inside ? "" : substr(line, c + 2)
            } else if (two == "//")
                return 1
            else if (two == "/*") {
                found = inside = 1
                line = substr(line, 3)
            } else {
                c = substr(line, 1, 1)
                line = substr(line, 2)
                if (c == "\"" || c == "\047") # skip the string or the character
                    for (quote = c; line != "" && c != ""; line = substr(line, c == "\\" ? 3 : 2)) {
                        c = substr(line, 1, 1)
                        if (c == quote) { line = substr(line, 2); break }
                    }
            }
        }
        return found
    }
    function report(name, comments, lines) {
        printf "%s: %d of %d lines hold a comment, %.1f %%\n", name, comments, lines, 100 * comments / lines
    }
    FNR == 1 && NR > 1 { report(file, comments, lines) }
    FNR == 1 { file = FILENAME; comments = lines = inside = 0 }
    {
        lines++
        all_lines++
        if (has_comment($0)) { comments++; all_comments++ }
    }
    END {
        report(file, comments, lines)
        report("together", all_comments, all_lines)
    }' "$@"
