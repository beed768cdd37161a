# Parses a JSON file strictly and prints one value per line: PATH, a tab, VALUE.
#
#   awk -f json.awk run.json
#   settings.epochs <tab> 1
#   classes[0] <tab> plane
#
# Strings are printed without quotes; escape sequences are kept as they are. Exit status 2, with line
# and reason on stderr, if the file is not valid JSON, is truncated, or has text after its end.

function stop(line, what) {
    printf "line %d: %s\n", line, what > "/dev/stderr"
    failed = 1
    exit 2
}

# Tokens do not span lines, since JSON strings contain no line breaks.
{
    rest = $0
    while (1) {
        sub(/^[ \t\r]+/, "", rest)
        if (rest == "")
            break
        if (match(rest, /^"([^"\\]|\\["\\\/bfnrt]|\\u[0-9a-fA-F][0-9a-fA-F][0-9a-fA-F][0-9a-fA-F])*"/) ||
            match(rest, /^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/) ||
            match(rest, /^(true|false|null)/) || match(rest, /^[][{}:,]/)) {
            token[++tokens] = substr(rest, 1, RLENGTH)
            where[tokens] = FNR
            rest = substr(rest, RLENGTH + 1)
        } else
            stop(FNR, "expected JSON, found " substr(rest, 1, 30))
    }
}

function want(expected) {
    if (at > tokens)
        stop(FNR, "expected " expected ", found the end of the file")
    if (index(expected, "\"" token[at] "\"") == 0)
        stop(where[at], "expected " expected ", found " token[at])
    return token[at++]
}

function text(quoted) { return substr(quoted, 2, length(quoted) - 2) }

function object(path,    key) {
    if (token[at] == "}") {
        at++
        return
    }
    do {
        if (at > tokens)
            stop(FNR, "expected a name, found the end of the file")
        if (token[at] !~ /^"/)
            stop(where[at], "expected a name in quotes, found " token[at])
        key = (path == "" ? "" : path ".") text(token[at++])
        if (key in seen)
            stop(where[at - 1], "expected each name once, found " key " again")
        seen[key] = 1
        want("\":\"")
        value(key)
    } while (want("\",\" or \"}\"") == ",")
}

function array(path,    i) {
    if (token[at] == "]") {
        at++
        return
    }
    i = 0
    do
        value(path "[" i++ "]")
    while (want("\",\" or \"]\"") == ",")
}

function value(path,    first) {
    if (at > tokens)
        stop(FNR, "expected a value, found the end of the file")
    first = token[at++]
    if (first == "{")
        object(path)
    else if (first == "[")
        array(path)
    else if (first ~ /^[]}:,]/)
        stop(where[at - 1], "expected a value, found " first)
    else
        lines[++count] = path "\t" (first ~ /^"/ ? text(first) : first)
}

END {
    if (failed)
        exit 2
    at = 1
    value("")
    if (at <= tokens)
        stop(where[at], "expected the end of the file, found " token[at])
    for (i = 1; i <= count; i++)
        print lines[i]
}
