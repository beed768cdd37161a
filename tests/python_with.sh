#!/bin/sh
# tests/python_with.sh PACKAGE: prints the first Python that can import it; ends with status 1 if there is none. PYTHON=PATH:
# looks there first. Debian's packages belong to /usr/bin/python3, which need not be the first in PATH.
for python in "${PYTHON:-}" "$(dirname "$0")/../.venv/bin/python" python3 /usr/bin/python3; do
    if "$python" -c "import $1" >/dev/null 2>&1; then
        echo "$python"
        exit 0
    fi
done
exit 1
