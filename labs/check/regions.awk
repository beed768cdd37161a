# The marked regions of a source file: /* LAB 1.2 BEGIN name */ ... /* LAB 1.2 END */.
#
#   -v mode=list  -v lab=1            prints "1.2 name" for each region of that lab
#   -v mode=take  -v id=1.2           prints the lines between the markers
#   -v mode=put   -v dir=DIR          replaces the lines between them by DIR/1.2, where that exists
#   -v mode=strip -v from=3 -v stubs=DIR   replaces them by a stub, for lab 3 and all later ones:
#                                     DIR/3.1 where it exists, else a line that says what to do
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
function print_stub(    message, indent) {
    if (print_file(stubs "/" open))
        return
    split(open, number, ".")
    indent = substr($0, 1, match($0, /[^ ]/) - 1)
    message = sprintf("lab %d, TODO %d is not done: %s in %s; see labs/lab%02d/README.md",
                      number[1], number[2], name, file, number[1])
    printf "%s// TODO %s: replace the next lines by your code\n", indent, open
    printf "%s%s(1,\n%s    \"%s\");\n", indent, file ~ /\.cu$/ ? "fail" : "die", indent, message
}

BEGIN { if (file == "") file = "cnn.c" }

/^[ \t]*\/\* LAB [0-9]+\.[0-9]+ BEGIN [A-Za-z0-9_]+ \*\/[ \t\r]*$/ {
    if (open != "")
        stop("LAB " $3 " begins inside LAB " open)
    if ($3 in seen)
        stop("LAB " $3 " begins twice; keep one of them")
    open = $3
    name = $5
    seen[open] = 1
    split(open, number, ".")
    if (mode == "list" && number[1] == lab)
        print open, name
    if (mode == "put" || mode == "strip")
        print
    replaced = 0
    if (mode == "put")
        replaced = print_file(dir "/" open)
    if (mode == "strip" && number[1] >= from) {
        print_stub()
        replaced = 1
    }
    next
}

/^[ \t]*\/\* LAB [0-9]+\.[0-9]+ END \*\/[ \t\r]*$/ {
    if (open != $3)
        stop("LAB " $3 " ends here, but " (open == "" ? "no part" : "LAB " open) " is open")
    open = ""
    replaced = 0
    if (mode == "put" || mode == "strip")
        print
    next
}

/LAB [0-9]+\.[0-9]+ (BEGIN|END)/ { stop("not a valid marker: " $0) }

mode == "take" && open == id && id != "" { print }
(mode == "put" || mode == "strip") && !(open != "" && replaced) { print }

END {
    if (failed)
        exit 2
    if (open != "")
        stop("LAB " open " has no END line")
    if (mode == "take" && !(id in seen))
        stop("there is no LAB " id " here; copy its two marker lines from the same file in labs/pristine")
}
