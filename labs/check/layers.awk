# Checks that the columns of layers.csv agree.   -v run=NAME -v batch=B
# GFLOP/s x saved = passes x MFLOP x B / ms: forward, and two passes backward (one in the first layer, whose
# input needs no gradient). All rows with the same bound have percentages of the same limit. Where the peak was not
# measured, which cnn_kernels.c does, no row has a bound or a percentage.

function wrong(row, what, expected, found) {
    printf "%s/layers.csv: %s in row %s should be %s, found %s\n", run, what, row, expected, found
    failed = 1
    exit 1
}

function near(a, b, part) { return a - b <= part * b && b - a <= part * b }

FNR == 1 {
    for (i = 1; i <= NF; i++)
        column[$i] = i
    next
}

{
    name = $1
    ms = $column["forward_ms"] + $column["backward_ms"]
    percent = $column["percent_of_peak"]
    bound = $column["bound"]
    rate = bound == "compute" ? $column["gflops"] : $column["gb_per_s"]
    if (!(ms > 0))
        wrong(name, "the time", "above 0", ms)
    limited = bound percent != ""
    if (limited && bound != "compute" && bound != "memory")
        wrong(name, "bound", "compute or memory", bound)
    if (limited && !(percent != "" && percent >= 0 && percent < 1000)) # 0.0 on a busy machine
        wrong(name, "percent_of_peak", "from 0 to below 1000", percent)
    if (FNR == 2)
        all_limited = limited
    if (limited != all_limited)
        wrong(name, "bound", all_limited ? "there, as in row 1" : "empty, as in row 1", bound)
    if ($column["mflop"] > .1 && $column["gflops"] > 0) {
        passes = $column["gflops"] * $column["saved"] * ms / ($column["mflop"] * batch)
        rounding = .02 + .01 / $column["gflops"] # which has two decimals
        if (!near(passes, 2, rounding) && !near(passes, 3, rounding))
            wrong(name, "gflops x saved x ms / (mflop x batch)", "2 or 3 passes", passes)
    }
    if (limited && percent >= 10) { # smaller ones are rounded too coarsely
        peak = 100 * rate / percent
        if (limit[bound] && !near(peak, limit[bound], .03))
            wrong(name, "the limit that percent_of_peak refers to", limit[bound] ", as in the other rows", peak)
        if (!limit[bound])
            limit[bound] = peak
    }
}
