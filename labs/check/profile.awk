# Checks that the line profile belongs to its run.   -v what=hits|cover, then epochs.csv and profile.csv
# A line in the loop over the batches runs once per step, a line outside of it once per epoch.

function wrong(what, expected, found) {
    printf "%s/profile.csv: %s should be %s, found %s\n", run, what, expected, found
    failed = 1
    exit 1
}

FNR == 1 {
    file++
    next
}
file == 1 {
    trained_us += 1e6 * $3 # epoch,images,seconds
    next
}

# line,hits,time_us,per_hit_us,percent,"source"
{
    lines++
    sum_us += $3
    percent += $5
    steps = epochs * int((n + batch - 1) / batch)
    if ($2 != steps && $2 != epochs)
        bad = bad (bad ? ", " : "") $2 " in line " $1
    off = $2 * $4 - $3 # per_hit_us is rounded to tenths
    if (odd == "" && (off > .01 * $3 + .1 * $2 || -off > .01 * $3 + .1 * $2))
        odd = $1
    for (i = 1; i <= 4; i++)
        if (index($0, part(i)) && $2 == steps)
            found[i] = 1
}

function part(i) {
    return i == 1 ? "next_batch(" : i == 2 ? "forward(net" : i == 3 ? "backward(net" : "update_weights("
}

END {
    if (failed)
        exit 1
    if (what == "hits") {
        if (bad)
            wrong("hits", steps " (" epochs " epochs x ceil(" n " / " batch ")) in the loop and " epochs \
                  " outside of it", bad)
        if (odd != "")
            wrong("time_us in line " odd, "hits x per_hit_us", "a different number")
        for (i = 1; i <= 4; i++)
            if (!found[i])
                wrong("the hits of the line with " part(i), steps, "no such line")
    } else {
        if (trained_us <= 0 || sum_us < .95 * trained_us)
            wrong("the lines' time", "at least 95 % of the epochs' " trained_us / 1e6 " s", sum_us / 1e6 " s")
        if (sum_us > 1.02 * trained_us)
            wrong("the lines' time", "at most the epochs' " trained_us / 1e6 " s", sum_us / 1e6 " s")
        if (percent < 99 || percent > 101)
            wrong("the sum of the percentages", 100, percent)
    }
}
