#!/usr/bin/env bash
# data/get_data.sh with curl and with wget, against a server on 127.0.0.1 and small files in place of the data sets.
# Prints `pass get_data/NAME`, `fail get_data/NAME: expected ..., found ...` or `skip get_data/NAME: why`.
suite=get_data
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY INSTALL WGETRC CURL_HOME XDG_CONFIG_HOME
export HOME=$tmp
data=$tmp/data system=$tmp/system closed=http://127.0.0.1:1 # where nothing listens

# The served files, and the table of their checksums
mkdir -p "$tmp/www" "$tmp/cifar/batches"
for file in a b; do head -c 20000 /dev/urandom >"$tmp/www/$file.gz"; done
for file in data_batch_1 test_batch; do head -c 5000 /dev/urandom >"$tmp/cifar/batches/$file.bin"; done
tar -czf "$tmp/www/c.tar.gz" -C "$tmp/cifar" batches
md5() { md5sum <"$tmp/www/$1" | cut -c 1-32; }
cat >"$tmp/table" <<END
one|a.gz|$(md5 a.gz)|20000
fashion-mnist|a.gz|$(md5 a.gz)|20000
fashion-mnist|b.gz|$(md5 b.gz)|20000
cifar10|c.tar.gz|$(md5 c.tar.gz)|-
END

# The server: ok/ serves www; norange/ ignores Range, refuse/ answers it with 416, cut/ stops half-way, bad/ sends other
# bytes, hang/ never answers.
cat >"$tmp/server.py" <<'END'
import http.server, os, re, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mode, name = self.path.strip("/").split("/", 1)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        print(f"{mode}:{first}", file=open("log", "a"))
        if mode == "hang":
            time.sleep(60)
        if mode == "nowhere":
            return self.send_error(404)
        data = open("www/" + name, "rb").read()
        if first and mode == "refuse" or first >= len(data):
            return self.send_error(416)
        if mode == "bad":
            data = bytes(255 - byte for byte in data)
        if mode == "norange":
            first = 0
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        self.wfile.write(data[first:len(data) // 2 if mode == "cut" else len(data)])
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, file=open("port", "w"), flush=True)
server.serve_forever()
END

# get MIRRORS SET...: from an empty log; what it says is in $out
get() {
    : >"$tmp/log"
    PATH=$path CNN_DATA_TABLE=$tmp/table CNN_DATA_DIR=$data CNN_SYSTEM_DATA=$system CNN_DATA_MIRROR=$1 \
        "$BASH" "$repo/data/get_data.sh" "${@:2}" >"$out" 2>&1 </dev/null
    status=$?
}

# left: the files that are there, or whether a.gz is the served one and alone
left() {
    local files
    files=$(cd "$data" 2>/dev/null && find . -type f -printf '%P ')
    if [ "$files" = "one/a.gz " ] && cmp -s "$data/one/a.gz" "$tmp/www/a.gz"; then echo whole; else echo "$files"; fi
}

# without PROGRAM...: $path, of links to all the others
without() {
    local folder
    rm -rf "${tmp:?}/bin" && mkdir "$tmp/bin" && path=$tmp/bin
    for folder in ${PATH//:/ }; do ln -s "$folder"/* "$path/" 2>/dev/null; done
    (cd "$path" && rm -f -- "$@")
}
# stand_in PROGRAM COMMANDS. A link of $path leads to the real program, which stays as it is.
stand_in() {
    rm -f "$path/$1"
    printf '#!/bin/sh\n%s\n' "$2" >"$path/$1" && chmod +x "$path/$1"
}

# Status, files and requests for each kind of server; PART: of an earlier download, the right bytes or others
test_servers() {
    local name part mirrors wanted words server=http://127.0.0.1:$1 kind
    while IFS='|' read -r name part mirrors wanted words; do
        rm -rf "$data" && mkdir -p "$data/one"
        [ -z "$part" ] || head -c 7000 "$tmp/www/$part" >"$data/one/a.gz.part"
        mirrors=$(for kind in $mirrors; do [ "$kind" = closed ] && echo $closed || echo "$server/$kind/"; done | xargs)
        get "$mirrors" one
        same "$2/$name" "$wanted" "$status $(left) $(paste -sd ' ' "$tmp/log")"
        [ -z "$words" ] || line "$2/$name/says" "$words"
    done <<'END'
good||ok|0 whole ok:0|^get .*/a.gz .20000 bytes.
resumes|a.gz|ok|0 whole ok:7000
useless_part|b.gz|ok|0 whole ok:7000 ok:0
refuses_range|a.gz|refuse|0 whole refuse:7000 refuse:0
not_there||nowhere|1  nowhere:0|nowhere/a.gz refused
next_mirror|a.gz|nowhere closed ok|0 whole nowhere:7000 ok:7000
corrupt||bad|1  bad:0|bad/a.gz sent a file with a wrong checksum
after_corrupt||bad ok|0 whole bad:0 ok:0
cut||cut|1 one/a.gz.part  cut:0|interrupted
silent||hang|1  hang:0|could not be reached
unreachable||closed|1  |^error one: no a.gz: .* could not be reached.*; .*--dataset synthetic.*login node
END
}

# What is already there
test_existing() {
    rm -rf "$data" && mkdir -p "$data/one"
    head -c 7000 "$tmp/www/a.gz" >"$data/one/a.gz.part"
    get "${1%ok}norange" one
    same ignores_range "0 whole" "$status $(left)"
    get "$1" one
    same have "0 whole " "$status $(left) $(cat "$tmp/log")"
    echo damage >>"$data/one/a.gz"
    get "$1" one
    same damaged "0 whole" "$status $(left)"
    rm -rf "$data" && mkdir -p "$data/one/a.gz" "$data/cifar10/test_batch.bin"
    get "$1" cifar10 one
    same folder "1 2" "$status $(grep -c "$data/.* is a folder, remove it" "$out")"
    rm -rf "$data" && mkdir -p "$data/one"
    head -c 7000 "$tmp/www/a.gz" >"$tmp/elsewhere"
    ln -s "$tmp/elsewhere" "$data/one/a.gz.part"
    get "$1" one
    same link "0 whole 7000" "$status $(left) $(stat -c %s "$tmp/elsewhere")"
    rm -rf "$data" && mkdir "$data" && touch "$data/one"
    get "$1" one
    same no_folder "1 1" "$status $(grep -c "^error one: cannot write to $data/one; CNN_DATA_DIR=DIR" "$out")"
    rm -rf "$data" && mkdir -p "$data/one/a.gz.part"
    get "$1" one
    same folder_part "1 1" "$status $(grep -c "a.gz.part is a folder, remove it" "$out")"
    rm -rf "$data" && mkdir -p "$data/one" "$data/cifar10/c.tar.gz.md5"
    mkfifo "$data/one/a.gz.part"
    get "$1" one cifar10
    same pipe_part "1 2 1" "$status $(grep -c get "$out") $(grep -c "c.tar.gz.md5 is a folder, remove it" "$out")"
}

test_cifar() {
    rm -rf "$data"
    get "$1" cifar10
    same cifar/unpacked "0 data_batch_1.bin test_batch.bin" "$status $(diff -qr "$tmp/cifar/batches" "$data/cifar10" |
        grep -v 'c.tar.gz.md5$')$(cd "$data/cifar10" && echo *.bin)"
    get "$1" cifar10
    same cifar/have "0 " "$status $(cat "$tmp/log")"
    echo damage >>"$data/cifar10/test_batch.bin"
    get "$1" cifar10
    same cifar/damaged 0 "$(cmp "$tmp/cifar/batches/test_batch.bin" "$data/cifar10/test_batch.bin"; echo $?)"
}

# Debian's package, in place of an apt-get that installs it
test_debian() {
    rm -rf "$data" && mkdir -p "$system/fashion-mnist"
    touch "$system/fashion-mnist/a.gz"
    get $closed fashion-mnist
    same debian/half "1 1" "$status $(grep -c 'sudo apt-get install dataset-fashion-mnist' "$out")"
    stand_in sudo 'exec "$@"'
    stand_in apt-get "echo \$* >$tmp/installed && touch $system/fashion-mnist/b.gz"
    get $closed fashion-mnist
    INSTALL=1 get $closed one
    same debian/not_asked "1 none" "$status $(cat "$tmp/installed" 2>/dev/null || echo none)"
    INSTALL=1 get $closed fashion-mnist
    same debian/asked "0 install -y dataset-fashion-mnist" "$status $(cat "$tmp/installed")"
    get $closed fashion-mnist
    same debian/have "0 1 " "$status $(grep -c "found in $system/fashion-mnist" "$out") $(left)"
}

test_usage() {
    local words
    for words in "" "one imagenet" "cifar1."; do
        # shellcheck disable=SC2086 # words
        get $closed $words
        same "usage/${words:-none}" "2 1" \
            "$status $(grep -cE '^usage:|expected one of: one fashion-mnist cifar10$' "$out")"
    done
    get $closed --help
    same usage/help "0 1" "$status $(grep -c '^usage:' "$out")"
    get $closed one
    line neither '^error one: .*neither curl nor wget is installed'
}

without curl wget
test_usage
test_debian
if ! command -v python3 >/dev/null; then
    skip downloads "python3 is not installed"
    exit 0
fi
(cd "$tmp" && exec python3 server.py) &
server=$!
trap 'kill $server; rm -rf "$tmp"' EXIT
until [ -s "$tmp/port" ]; do sleep 0.1; done
port=$(cat "$tmp/port")
for downloader in curl wget; do
    command -v $downloader >/dev/null || { skip $downloader "$downloader is not installed" && continue; }
    path=$PATH
    [ $downloader = curl ] || without curl
    test_servers "$port" $downloader
    test_existing "http://127.0.0.1:$port/ok"
    test_cifar "http://127.0.0.1:$port/ok"
done
without md5sum
stand_in md5 "[ \"\$1\" = -q ] && $(command -v md5sum) | cut -c 1-32" # macOS's
rm -rf "$data" && mkdir -p "$data"
get "http://127.0.0.1:$port/ok" one
same md5 "0 whole" "$status $(left)"
stand_in tar "touch \"\$4/half\" && exit 1" # on a full disk
rm -rf "$data"
get "http://127.0.0.1:$port/ok" cifar10
same no_space "1 1 cifar10/c.tar.gz" "$status $(grep -c 'c.tar.gz could not be unpacked: is the disk or the quota full' \
    "$out") $(left | xargs)"
exit 0
