# The code of a C source: comments become a blank, texts "", characters '0'; a line that ends in a
# backslash, also with blanks behind it, goes on with the next one, as for compilers.

{ text = text $0 "\n" }

END {
    gsub(/\r/, "", text)
    gsub(/\\[ \t]*\n/, " ", text)
    size = length(text)
    for (i = 1; i <= size; i++) {
        c = substr(text, i, 1)
        two = substr(text, i, 2)
        if (within == "") {
            if (two == "//" || two == "/*") {
                within = two
                i++
                out = out " "
            } else if (c == "\"" || c == "'") {
                within = c
                out = out (c == "\"" ? "\"\"" : "'0'")
            } else
                out = out c
        } else if (within == "/*") {
            if (two == "*/") {
                within = ""
                i++
            } else if (c == "\n")
                out = out c
        } else if (c == "\n" || c == within) { # a text ends with its line at the latest
            within = ""
            out = out (c == "\n" ? c : "")
        } else if (within != "//" && c == "\\")
            i++
    }
    printf "%s", out
}
