#!/usr/bin/env bash
# labs/classroom/generate.sh LAB DIR: for a class whose starters lie in repositories on GitHub, one
# command for each test of the lab:
#   DIR/.github/workflows/classroom.yml   runs them at each push; it needs nothing but GitHub Actions
#   DIR/labs/classroom/tests.json         the same as Classroom 50's declarative tests
set -eu
cd "$(dirname "$0")/../.."
lab=$1 dir=$2
workflow=$dir/.github/workflows/classroom.yml tests=$dir/labs/classroom/tests.json
mkdir -p "$(dirname "$workflow")" "$(dirname "$tests")"

# The lab's lines `points|TODOs|title`
list() {
    # shellcheck disable=SC2016 # for the inner shell
    home=$PWD bash -c '. "$home/labs/check/lab0$1.sh"; tests' - "$lab"
}

list | awk -F '|' -v lab="$lab" '
    BEGIN {
        print "# Each test by itself, then all of them with the points. Made by labs/classroom/generate.sh."
        print "name: lab " lab "\non: [push, workflow_dispatch]\npermissions:\n  contents: read\njobs:"
        print "  check:\n    runs-on: ubuntu-latest\n    steps:\n      - uses: actions/checkout@v4"
    }
    {
        gsub(/\047/, "&&", $3)
        printf "      - name: \047test %d, %d point%s: %s\047\n", NR, $1, ($1 == 1 ? "" : "s"), $3
        print "        if: ${{ !cancelled() }}\n        timeout-minutes: 10"
        print "        run: make check LAB=" lab " TEST=" NR
    }
    END {
        print "      - name: all points\n        if: ${{ !cancelled() }}\n        timeout-minutes: 30"
        print "        run: make check LAB=" lab
    }' >"$workflow"

list | awk -F '|' -v lab="$lab" '
    BEGIN { printf "[" }
    {
        name = substr("test " NR ": " $3, 1, 100)
        gsub(/[\\"]/, "\\\\&", name)
        printf "%s\n  {\"name\": \"%s\", \"type\": \"run\", \"run\": \"make check LAB=%d TEST=%d\", ", \
            (NR > 1 ? "," : ""), name, lab, NR
        printf "\"timeout\": 600, \"points\": %d}", $1
    }
    END { print "\n]" }' >"$tests"
