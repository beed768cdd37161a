#!/usr/bin/env bash
# labs/check/apart.h: a student's code, in the worker, reaches nothing of the checker, and the checker says how the
# worker has ended.
# Prints `pass apart/NAME` or `fail apart/NAME: expected ..., found ...`.
export suite=apart
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

build() {
    # shellcheck disable=SC2154 # lib.sh sets repo and tmp
    cd "$repo" && "${CC:-gcc}" -std=gnu17 -g -Wall -Wextra -Werror -c tests/labs/apart_test.c -o "$tmp/test.o" &&
        "${CC:-gcc}" "$tmp/test.o" -o "$tmp/worker" -lpthread && # without what the checker alone has
        "${CC:-gcc}" -std=gnu17 -g -Wall -Wextra -Werror "$tmp/test.o" labs/check/apart.c -o "$tmp/test" -lpthread
}
build || { fail builds "two programs" "none" && exit 1; }

# attack NAME EXPECTED: with the descriptors that check.sh gives a test
attack() {
    local token=token-of-$1 said
    said=$("$tmp/test" "$tmp/worker" "$1" <<<"$token" 8>"$tmp/verdict" 9>"$tmp/token" | tail -n 1)
    same "$1" "$2" "$said"
    same "$1/verdict" "" "$(cat "$tmp/verdict")"
    same "$1/token" "$token" "$(cat "$tmp/token")"
}

attack writes 'found 0, returned'
attack reads 'found 0, returned'
attack opens 'found 0, returned'
attack searches 'found 0, returned'
attack ends 'found 0, ended its program with exit status 0 instead of returning'
attack loops 'found 0, does not return: an endless loop?'
attack null 'found 0, accessed a number of an array that does not exist: its pointer is NULL'
attack far 'found 0, was ended by signal 11 (Segmentation fault): an access outside of an array?'
attack aborts 'found 0, was ended by signal 6 (Aborted); see below'
