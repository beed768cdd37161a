# Checks that the numbers of epochs.csv and steps.csv agree with each other and with run.json's settings.
#   awk -F , -v run=NAME -v epochs=E -v n=N -v batch=B -v world=W -v iterations=I -f counts.awk \
#       epochs.csv steps.csv
# N images in batches of B: every epoch has ceil(N / B) steps, a row for each of the W devices.

function wrong(what, expected, found) {
    printf "%s: %s should be %s, found %s\n", run, what, expected, found
    failed = 1
    exit 1
}

# Whether a differs from b by at most that part of b and `least` more, such as b's rounding.
function near(a, b, part, least) {
    return a - b <= part * b + least && b - a <= part * b + least
}

FNR == 1 {
    file++
    for (i = 1; i <= NF; i++)
        column[$i] = i
    next
}

file == 1 {
    rows++
    if ($column["epoch"] != rows)
        wrong("the epoch in row " rows " of epochs.csv", rows, $column["epoch"])
    images[rows] = $column["images"]
    loss[rows] = $column["train_loss"]
    seconds[rows] = $column["seconds"]
    if (images[rows] != n)
        wrong("images in epoch " rows, n, images[rows])
    # both are rounded: seconds to thousandths, images per second to whole ones
    rate = $column["img_per_s"]
    product = seconds[rows] * rate
    if (!(seconds[rows] > 0 && rate > 0) || !near(product, n, .01 + .001 / seconds[rows] + .5 / rate, 1e-9))
        wrong("seconds x img_per_s in epoch " rows, n, product)
}

file == 2 {
    e = $column["epoch"]
    if ($column["loss"] !~ /^[0-9.]+(e[-+]?[0-9]+)?$/)
        wrong("the loss of a step in epoch " e, "a number", $column["loss"])
    steps[e]++
    trained[e] += $column["images"]
    sum[e] += $column["images"] * $column["loss"]
    if ($column["rank"] == 0)
        spent[e] += $column["seconds"]
}

END {
    if (failed)
        exit 1
    if (epochs !~ /^[0-9]+$/ || n !~ /^[1-9][0-9]*$/ || batch !~ /^[1-9][0-9]*$/ || world < 1)
        wrong("run.json's epochs, limit-train, global_batch and world", "numbers", \
              epochs ", " n ", " batch ", " world)
    ceil = int((n + batch - 1) / batch)
    if (iterations != ceil)
        wrong("iterations in run.json", "ceil(" n " / " batch ") = " ceil, iterations)
    if (rows != epochs)
        wrong("rows of epochs.csv", epochs, rows + 0)
    for (e = 1; e <= epochs; e++) {
        if (steps[e] != ceil * world)
            wrong("rows of steps.csv in epoch " e, ceil " x " world " devices", steps[e] + 0)
        if (trained[e] != n)
            wrong("images of all steps in epoch " e, n, trained[e])
        if (!near(sum[e] / n, loss[e], .001, .0000501))
            wrong("train_loss of epoch " e, sum[e] / n ", the mean of its steps", loss[e])
        if (spent[e] > 1.02 * seconds[e] + .002)
            wrong("seconds of epoch " e, "at least " spent[e] ", the sum of its steps", seconds[e])
    }
}
