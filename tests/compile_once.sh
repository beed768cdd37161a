#!/usr/bin/env bash
# Compilers that compile the same text with the same options only once; the next time they copy the result:
#
#   source tests/compile_once.sh && compile_once FOLDER
#
# From then on gcc, g++, clang and clang++ of this shell are such compilers. FOLDER, an absolute path that COMPILED
# passes on, keeps what they have made. UNCACHED is the PATH without them.
#
# The tests build the same programs in many folders: starters, solved labs, copies and clones of the project. ccache
# caches neither what is compiled and linked in one step, as the checkers of the labs do, nor what comes from a pipe, as
# the kernels for the emulator do. A copy differs in one thing: with -g it names the folder of the first compilation.

# The programs are in a folder of their own, since another shell may have other compilers, such as none for C++.
compile_once() {
    local compiler real programs
    export COMPILED=$1 UNCACHED=${UNCACHED:-$PATH}
    mkdir -p "$1" && programs=$(mktemp -d "$1/bin.XXXXXX") && chmod 755 "$1" "$programs" || return
    for compiler in gcc g++ clang clang++; do
        real=$(type -P $compiler) || continue
        # in the sandbox of labs/grade, which cannot write to FOLDER, the real one
        printf '#!/bin/sh\n[ ! -w %q ] || exec bash %q %q %q "$@"\nexec %q "$@"\n' "$1" \
            "$(realpath "${BASH_SOURCE[0]}")" "$1" "$real" "$real" >"$programs/$compiler"
        chmod 755 "$programs/$compiler"
    done
    PATH=$programs:$PATH
}

# compiles ARGUMENTS...: whether they compile a source to a file
compiles() {
    local word source='' out='' last=''
    for word; do
        case $word in
            -E | -M* | -S | -fsyntax-only | -save-temps*) return 1 ;;
            - | *.c | *.cpp) source=yes ;;
        esac
        [ "$last" != -o ] || out=$word
        last=$word
    done
    [[ -n $source && -n $out && $out != /dev/null ]]
}

# key COMPILER TEXT ARGUMENTS...: a name of the arguments, the preprocessed text and the objects that are linked; fails
# where there is no such text
key() {
    local word
    {
        printf '%s\n' "$1" "${@:3}"
        for word in "${@:3}"; do [[ $word != *.[ao] ]] || cat "$word"; done
        # -g adds a line with the name of this folder
        "$1" "${@:3}" -E <"$2" 2>/dev/null | sed '/^# [0-9]* "\/.*\/\/"$/d'
    } | sha1sum | cut -c 1-40
}

# compile FOLDER COMPILER ARGUMENTS...: in place of COMPILER ARGUMENTS...
compile() {
    local folder=$1 compiler=$2 text=/dev/null mine=$1/$BASHPID.$RANDOM$RANDOM out='' last='' word made status
    local -a options=()
    shift 2
    compiles "$@" || exec "$compiler" "$@"
    for word; do
        if [ "$last" = -o ]; then out=$word; elif [ "$word" != -o ]; then options+=("$word"); fi
        [ "$word" != - ] || { text=$mine.text && cat >"$text"; }
        last=$word
    done
    if ! made=$folder/$(key "$compiler" "$text" "${options[@]}"); then
        exec <"$text" && rm -f "$mine.text"
        exec "$compiler" "$@"
    fi
    if [ ! -f "$made" ]; then
        "$compiler" "$@" <"$text" 2>"$mine.said"
        status=$?
        [ $status -eq 0 ] || { cat "$mine.said" >&2; rm -f "$mine".{text,said}; return $status; }
        mv "$mine.said" "$made.said"
        cp "$out" "$mine" && mv "$mine" "$made"
    fi
    cat "$made.said" >&2
    rm -f "$mine".{text,said}
    cp --remove-destination "$made" "$out"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -o pipefail
    compile "$@"
fi
