# Prints the code of a C source: a comment becomes a blank, a string "", a character constant '0'.
# A line that ends in a backslash, even with blanks after it, is joined with the next, as compilers do; a form feed
# is a blank; a digraph such as <% becomes the { that it stands for.

BEGIN {
    digraphs["<%"] = "{"; digraphs["%>"] = "}"
    digraphs["<:"] = "["; digraphs[":>"] = "]"
    digraphs["%:"] = "#"
}

{ text = text $0 "\n" }

END {
    gsub(/\r/, "", text)
    gsub(/[\f\v]/, " ", text)
    gsub(/\\[ \t]*\n/, "", text)
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
            } else if (two in digraphs) {
                out = out digraphs[two]
                i++
            } else
                out = out c
        } else if (within == "/*") {
            if (two == "*/") {
                within = ""
                i++
            } else if (c == "\n")
                out = out c
        } else if (c == "\n" || c == within) { # a string ends with its line at the latest
            within = ""
            out = out (c == "\n" ? c : "")
        } else if (within != "//" && c == "\\")
            i++
    }
    printf "%s", out
}
