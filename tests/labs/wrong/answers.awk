# Makes the wrong answers of a lab: for each case of labNN.txt, OUT/CASE is a solution with the case's edit.
#
#   awk -v parts=DIR -v out=OUT -f answers.awk labNN.txt
#
# DIR/3.1 is the solution of part 3.1. Prints a line `CASE: WHY` for each case that cannot be made, and does not write
# it. Cases of run folders, which have lines `$ COMMAND`, are left out. ../../README.md describes the format.

function bad(why) {
    if (!wrong)
        print name ": " why
    wrong = 1
}

# Indentation does not count.
function bare(text) { sub(/^[ \t]+/, "", text); return text }

function begin_case(title) {
    name = title
    part = title
    sub(/-.*/, "", part)
    wrong = hunks = in_hunk = has_old = has_expect = is_run = 0
    split("", olds); split("", old); split("", news); split("", new)
    if (name in seen)
        bad("there are two cases of this name")
    seen[name] = 1
}

# A line of the edit: ` kept`, `-taken out` or `+put in`
function add_line(sign, text) {
    if (!in_hunk)
        hunks++
    in_hunk = 1
    if (sign != "+")
        old[hunks, ++olds[hunks]] = bare(text)
    if (sign != "-")
        new[hunks, ++news[hunks]] = text
    if (sign != "+")
        has_old = 1
}

function read_solution(path,    text) {
    lines = 0
    while ((getline text < path) > 0)
        line[++lines] = text
    close(path)
    if (!lines)
        bad("there is no part " part)
}

# Whether the old lines of hunk h stand at line `at` of the solution
function fits(h, at,    i) {
    for (i = 1; i <= olds[h]; i++)
        if (at + i - 1 > lines || bare(line[at + i - 1]) != old[h, i])
            return 0
    return 1
}

# Where hunk h belongs in the solution: the number of its first line there
function place_of(h,    at, times, place) {
    if (!olds[h])
        bad("where does `" new[h, 1] "` belong? Begin with a line that is kept, after a space")
    for (at = 1; at <= lines; at++)
        if (fits(h, at)) {
            place = at
            times++
        }
    if (times != 1)
        bad("`" old[h, 1] "`" (olds[h] > 1 ? " with the lines after it" : "") " is in the solution " \
            times + 0 " times, expected once")
    return place
}

function new_lines(h,    i, text) {
    for (i = 1; i <= news[h]; i++)
        text = text new[h, i] "\n"
    return text
}

# All new lines
function whole_answer(    h, text) {
    for (h = 1; h <= hunks; h++)
        text = text new_lines(h)
    return text
}

# The solution with the new lines of each hunk in the place of its old ones
function edited_solution(    h, i, place, text) {
    split("", gone); split("", put)
    for (h = 1; h <= hunks; h++) {
        place = place_of(h)
        put[place] = new_lines(h)
        for (i = 0; i < olds[h]; i++)
            gone[place + i] = 1
    }
    for (i = 1; i <= lines; i++)
        text = text put[i] (i in gone ? "" : line[i] "\n")
    return text
}

function solution(    i, text) {
    for (i = 1; i <= lines; i++)
        text = text line[i] "\n"
    return text
}

function end_case(    text) {
    if (name == "")
        return
    if (!has_expect)
        bad("there is no line `expect REGEX`")
    if (is_run)
        return
    if (!hunks)
        bad("there is no edit")
    read_solution(parts "/" part)
    text = has_old ? edited_solution() : whole_answer()
    if (text == solution())
        bad("the edit changes nothing")
    if (!wrong)
        printf "%s", text > (out "/" name)
    close(out "/" name)
}

/^case / { end_case(); begin_case($2); next }
/^expect ./ { has_expect = 1; next }
/^from / { part = $2; next }
/^#/ { next }
/^\$/ { is_run = 1; next }
/^$/ { in_hunk = 0; next }
/^[-+ ]/ { add_line(substr($0, 1, 1), substr($0, 2)); next }
{ bad("not a line of a case: " $0) }
END { end_case() }
