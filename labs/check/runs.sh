#!/usr/bin/env bash
# runs.sh LAB TEST FROM: a test of run folders, by runs.py. Exit status 77: skipped, since Python is missing.
needed='import sys; sys.exit(sys.version_info < (3, 8))'
if ! python3 -c "$needed" 2>/dev/null; then
    echo "run folders are read by Python 3.8 or newer, which was not found; to earn these points install python3 and" \
        "run make check LAB=$1 again"
    exit 77
fi
exec python3 -B "${BASH_SOURCE[0]%.sh}.py" "$@" 2>&1
