# The marked regions of a source file: /* LAB 1.2 BEGIN name */ ... /* LAB 1.2 END */.
#
#   -v mode=list  -v lab=1            prints "1.2 name" for each region of that lab
#   -v mode=take  -v id=1.2           prints what stands between the markers
#   -v mode=put   -v dir=DIR          puts DIR/1.2 between the markers, for each file that is there
#   -v mode=strip -v from=3 -v stubs=DIR   puts a stub there, for lab 3 and all later ones:
#                                     DIR/3.1 where there is one, else a line that says what to do
#
# Exit status 2: the markers of the file do not pair up, or there is no such region.

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

# A stub of the language that the file is written in; both end the program with a message.
function print_stub(    message, indent) {
    if (print_file(stubs "/" open))
        return
    split(open, number, ".")
    indent = substr($0, 1, match($0, /[^ ]/) - 1)
    message = sprintf("lab %d, TODO %d is not done: %s in %s; labs/lab%02d/README.md tells what to do",
                      number[1], number[2], name, file, number[1])
    printf "%s// TODO %s: write this part, instead of the next lines\n", indent, open
    printf "%s%s(1,\n%s    \"%s\");\n", indent, file ~ /\.cu$/ ? "fail" : "die", indent, message
}

BEGIN { if (file == "") file = "cnn.c" }

/^[ \t]*\/\* LAB [0-9]+\.[0-9]+ BEGIN [A-Za-z0-9_]+ \*\/[ \t\r]*$/ {
    if (open != "")
        stop("LAB " $3 " begins inside of LAB " open)
    if ($3 in seen)
        stop("LAB " $3 " is there twice")
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
        stop("LAB " $3 " ends here, but " (open == "" ? "none" : "LAB " open) " has begun")
    open = ""
    replaced = 0
    if (mode == "put" || mode == "strip")
        print
    next
}

/LAB [0-9]+\.[0-9]+ (BEGIN|END)/ { stop("a marker that is none: " $0) }

mode == "take" && open == id && id != "" { print }
(mode == "put" || mode == "strip") && !(open != "" && replaced) { print }

END {
    if (failed)
        exit 2
    if (open != "")
        stop("LAB " open " has no end")
    if (mode == "take" && !(id in seen))
        stop("there is no LAB " id " here; its markers are needed: make a new starter and copy them")
}
