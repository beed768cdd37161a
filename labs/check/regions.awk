# The marked regions of a source file: /* LAB 1.2 BEGIN name */ ... /* LAB 1.2 END */. A region that two labs change
# has both numbers, /* LAB 1.1 2.1 BEGIN name */; in a starter it has the one whose stub it contains.
#
#   -v mode=list  -v lab=1            prints "1.2 name" for each region of that lab
#   -v mode=take  -v id=1.2           prints the lines between the markers
#   -v mode=put   -v dir=DIR          replaces the lines between them by DIR/1.2, where that exists
#   -v mode=strip -v from=3 -v stubs=DIR   replaces them by a stub, for lab 3 and all later ones:
#                                     DIR/3.1 where it exists, else a line that says what to do;
#                                     10.0 for lab 10 only, since labs 7 and 9 use what it replaces
#
# Exit status 2: a marker has no partner, or there is no such region.

function stop(what) {
    printf "%s:%d: %s\n", FILENAME, FNR, what > "/dev/stderr"
    failed = 1
    exit 2
}

function print_file(path,    line, found) {
    while ((getline line < path) > 0) {
        print line
        found = 1
    }
    close(path)
    return found
}

# A stub in the file's language, C or CUDA, that ends the program with a message.
function print_stub(id,    message, indent) {
    if (print_file(stubs "/" id))
        return
    split(id, number, ".")
    indent = substr($0, 1, match($0, /[^ ]/) - 1)
    message = sprintf("lab %d, TODO %d is not done: %s in %s; see labs/lab%02d/README.md",
                      number[1], number[2], name, file, number[1])
    printf "%s// TODO %s: replace the next lines by your code\n", indent, id
    printf "%s%s(1,\n%s    \"%s\");\n", indent, file ~ /\.cu$/ ? "fail" : "die", indent, message
}

# Whether the starter of lab `from` has a stub for this part, number[1].number[2].
function has_stub() {
    return number[1] == 10 && number[2] == 0 ? from == 10 : number[1] >= from
}

# Splits `1.1 2.1`, what stands between LAB and BEGIN or END, into ids[1] and so on.
function read_ids(    text) {
    text = $0
    sub(/^[ \t]*\/\* LAB /, "", text)
    sub(/ (BEGIN|END) .*/, "", text)
    all = text
    count = split(text, ids, " ")
}

BEGIN { if (file == "") file = "cnn.c" }

/^[ \t]*\/\* LAB [0-9]+\.[0-9]+( [0-9]+\.[0-9]+)* BEGIN [A-Za-z0-9_]+ \*\/[ \t\r]*$/ {
    read_ids()
    if (open != "")
        stop("LAB " all " begins inside LAB " open)
    name = $(count + 4)
    replaced = stripped = ""
    for (i = 1; i <= count; i++) {
        if (ids[i] in seen)
            stop("LAB " ids[i] " begins twice; keep one of them")
        seen[ids[i]] = 1
        split(ids[i], number, ".")
        if (mode == "list" && number[1] == lab)
            print ids[i], name
        if (mode == "strip" && has_stub() && stripped == "")
            stripped = ids[i]
    }
    open = all
    taking = mode == "take" && id != "" && index(" " all " ", " " id " ")
    line = $0
    if (stripped != "")
        sub(/LAB .* BEGIN/, "LAB " stripped " BEGIN", line)
    if (mode == "put" || mode == "strip")
        print line
    for (i = 1; i <= count && mode == "put" && !replaced; i++)
        replaced = print_file(dir "/" ids[i])
    if (stripped != "") {
        print_stub(stripped)
        replaced = 1
    }
    next
}

/^[ \t]*\/\* LAB [0-9]+\.[0-9]+( [0-9]+\.[0-9]+)* END \*\/[ \t\r]*$/ {
    read_ids()
    if (open != all)
        stop("LAB " all " ends here, but " (open == "" ? "no part" : "LAB " open) " is open")
    line = $0
    if (stripped != "")
        sub(/LAB .* END/, "LAB " stripped " END", line)
    open = replaced = stripped = ""
    taking = 0
    if (mode == "put" || mode == "strip")
        print line
    next
}

/LAB [0-9]+\.[0-9]+( [0-9]+\.[0-9]+)* (BEGIN|END)/ { stop("not a valid marker: " $0) }

taking { print }
(mode == "put" || mode == "strip") && !(open != "" && replaced) { print }

END {
    if (failed)
        exit 2
    if (open != "")
        stop("LAB " open " has no END line")
    if (mode == "take" && !(id in seen))
        stop("there is no LAB " id " here; copy its two marker lines from the same file in labs/pristine")
}
