#!/usr/bin/env bash
# Tests data/get_data.sh against a small HTTP server on 127.0.0.1. Prints one
# line a test: pass NAME, fail NAME: what was expected and found, or
# skip NAME: why. The exit status is 0 unless this script itself broke.
#
# The checksums of the real sets are fixed, so the tests give get_data.sh a
# table of their own (CNN_DATA_TABLE) with files made on the spot.
#
# Tests are functions that run() calls by name, which shellcheck cannot follow:
# shellcheck disable=SC2317
set -u
export LC_ALL=C

script=$(CDPATH='' cd -- "$(dirname -- "$0")/../../data" && pwd)/get_data.sh
[ -f "$script" ] || { echo "no $script" >&2; exit 1; }
tmp=$(mktemp -d) || exit 1
server=''
trap '[ -z "$server" ] || { kill "$server"; wait "$server"; } 2>/dev/null; rm -rf -- "$tmp"' EXIT
trap 'exit 130' INT TERM

# Nothing of the user's may change what curl and wget do here.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY INSTALL WGETRC CURL_HOME XDG_CONFIG_HOME
export HOME=$tmp

md5() { if command -v md5sum >/dev/null; then md5sum <"$1" | cut -c1-32; else md5 -q <"$1"; fi; }

# ---------------------------------------------------------------- the server

# www/ is served under /ok/. The other first path parts misbehave:
#   /norange/ ignores Range, /refuse/ answers it with 416, /cut/ stops half-way,
#   /bad/ sends other bytes, /hang/ never answers; anything else is 404.
cat >"$tmp/server.py" <<'END'
import http.server, os, re, sys, time
top = sys.argv[1]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mode, name = self.path.strip("/").split("/", 1)
        asked = self.headers.get("Range", "-")
        with open(top + "/log", "a") as log:
            log.write("%s %s %s\n" % (mode, name, asked))
        if mode == "hang":
            time.sleep(60)
            return
        path = os.path.join(top, "www", os.path.basename(name))
        modes = ("ok", "norange", "refuse", "cut", "bad")
        if mode not in modes or not os.path.exists(path):
            return self.send_error(404)
        with open(path, "rb") as file:
            data = file.read()
        if mode == "bad":
            data = bytes(255 - b for b in data)
        start = 0
        match = re.fullmatch(r"bytes=(\d+)-", asked)
        if match and mode != "norange":
            start = int(match.group(1))
            if mode == "refuse" or start >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", "bytes %d-%d/%d" % (start, len(data) - 1, len(data)))
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = len(data) // 2 if mode == "cut" else len(data)
        self.wfile.write(data[start:end])

    def log_message(self, *args):
        pass

httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
httpd.daemon_threads = True
with open(top + "/port.new", "w") as file:
    file.write(str(httpd.server_port))
os.rename(top + "/port.new", top + "/port")
httpd.serve_forever()
END

start_server() {
    local i
    python3 "$tmp/server.py" "$tmp" >"$tmp/server.out" 2>&1 &
    server=$!
    for ((i = 0; i < 100; i++)); do
        [ -s "$tmp/port" ] && break
        sleep 0.1
    done
    [ -s "$tmp/port" ] || { echo "the test server did not start:" >&2; cat "$tmp/server.out" >&2; exit 1; }
    url=http://127.0.0.1:$(cat "$tmp/port")
}

# ----------------------------------------------------------- files to fetch

make_files() {
    local set file
    mkdir "$tmp/www" "$tmp/tar" "$tmp/tar/cifar-10-batches-bin"
    for file in train-images train-labels t10k-images t10k-labels; do
        head -c 20000 /dev/urandom >"$tmp/www/$file.gz"
    done
    for file in data_batch_1 data_batch_2 test_batch; do
        head -c 5000 /dev/urandom >"$tmp/tar/cifar-10-batches-bin/$file.bin"
    done
    tar -czf "$tmp/www/c10.tar.gz" -C "$tmp/tar" cifar-10-batches-bin
    {
        for set in mnist fashion-mnist; do
            for file in train-images train-labels t10k-images t10k-labels; do
                echo "$set|$file.gz|$(md5 "$tmp/www/$file.gz")|20000"
            done
        done
        echo "cifar10|c10.tar.gz|$(md5 "$tmp/www/c10.tar.gz")|-"
        # Sets of one file, for the tests that are about one download.
        echo "one|train-images.gz|$(md5 "$tmp/www/train-images.gz")|20000"
        echo "two|train-labels.gz|$(md5 "$tmp/www/train-labels.gz")|20000"
        echo "gone|gone.gz|00000000000000000000000000000000|-"
    } >"$tmp/table"
}

# --------------------------------------------------------------- the harness

# get MIRRORS ARG...: runs the script for the present test; afterwards $rc,
# $took (seconds), $dir/out (both outputs) and $tmp/log (requests) tell of it.
get() {
    local mirrors=$1
    shift
    : >"$tmp/log"
    SECONDS=0
    PATH=$path CNN_DATA_TABLE=$table CNN_DATA_DIR=$dir/data CNN_SYSTEM_DATA=$dir/system \
        CNN_DATA_MIRROR=$mirrors "$bash" "$script" "$@" >"$dir/out" 2>&1 </dev/null
    rc=$?
    took=$SECONDS
}

expect() { # WHAT WANTED FOUND
    [ "$2" = "$3" ] || wrong="$wrong $1: expected '$2', found '$3';"
}

expect_word() { # WORDS, in the output of the last run
    grep -qF -- "$1" "$dir/out" || wrong="$wrong output: expected '$1', found '$(tr '\n' ' ' <"$dir/out")';"
}

expect_same() { # FILE in the target folder, FILE it must equal
    cmp -s "$dir/data/$1" "$2" || wrong="$wrong $1: expected the served bytes, found $(ls -l "$dir/data/$1" 2>&1);"
}

files() { (cd "$dir/data" 2>/dev/null && find . -type f | sort | tr '\n' ' '); }

requests() { grep -c . "$tmp/log"; }

start_part() { # BYTES SOURCE: an interrupted download of set "one"
    mkdir -p "$dir/data/one"
    head -c "$1" "$2" >"$dir/data/one/train-images.gz.part"
}

# A PATH with all commands but those named. Links, since the unwanted ones
# share their folder with the wanted ones.
path_without() {
    local d rest=$PATH:
    mkdir "$dir/bin"
    while [ -n "$rest" ]; do
        d=${rest%%:*} rest=${rest#*:}
        ln -s "$d"/* "$dir/bin/" 2>/dev/null # the first of a name stays, as in PATH
    done
    (cd "$dir/bin" && rm -f -- "$@")
    path=$dir/bin
}

command_in_path() { # NAME TEXT: a stand-in for a system command
    mkdir -p "$dir/bin"
    rm -f -- "$dir/bin/$1"
    printf '#!%s\n%s\n' "$bash" "$2" >"$dir/bin/$1"
    chmod +x "$dir/bin/$1"
    [ "$path" = "$dir/bin" ] || path=$dir/bin:$PATH
}

fill_system() {
    mkdir -p "$dir/system/fashion-mnist"
    touch "$dir/system/fashion-mnist/"{train-images,train-labels,t10k-images,t10k-labels}.gz
}

# An apt-get that "installs" by letting a prepared folder appear, and a sudo
# that only runs its command: the tests install nothing on this machine.
fake_apt() {
    fill_system
    mv "$dir/system" "$dir/package"
    command_in_path apt-get "echo \"\$*\" >>'$dir/apt'; mv '$dir/package' '$dir/system'"
    command_in_path sudo "exec \"\$@\""
}

# ------------------------------------------------ tests that need no server

no_argument_prints_usage() {
    get "$closed"
    expect "exit" 2 "$rc"
    expect_word "usage:"
}

help_exits_0() {
    get "$closed" -h
    expect "exit" 0 "$rc"
    expect_word "usage:"
}

unknown_name_exits_2() {
    table=''
    get "$closed" mnist imagenet
    expect "exit" 2 "$rc"
    expect "lines printed" 1 "$(grep -c . "$dir/out")"
    expect_word "imagenet"
    expect_word "mnist fashion-mnist cifar10 cifar100"
    get "$closed" 'cifar1.'
    expect "exit for a pattern" 2 "$rc"
}

debian_folder_is_used() {
    fill_system
    get "$closed" fashion-mnist
    expect "exit" 0 "$rc"
    expect "files" "" "$(files)"
    expect_word "found in $dir/system/fashion-mnist"
}

debian_folder_must_be_whole() {
    fill_system
    rm "$dir/system/fashion-mnist/t10k-labels.gz"
    get "$closed" fashion-mnist
    expect "exit" 1 "$rc"
}

without_INSTALL_only_prints_apt() {
    fake_apt
    get "$closed" fashion-mnist
    expect "exit" 1 "$rc"
    expect "apt-get called with" "" "$(cat "$dir/apt" 2>/dev/null)"
    expect_word "sudo apt-get install dataset-fashion-mnist"
}

INSTALL_1_installs_the_package() {
    fake_apt
    INSTALL=1 get "$closed" fashion-mnist
    expect "exit" 0 "$rc"
    expect "apt-get called with" "install -y dataset-fashion-mnist" "$(cat "$dir/apt" 2>/dev/null)"
}

INSTALL_1_is_for_fashion_mnist_only() {
    fake_apt
    INSTALL=1 get "$closed" mnist
    expect "exit" 1 "$rc"
    expect "apt-get called with" "" "$(cat "$dir/apt" 2>/dev/null)"
}

offline_says_what_works() {
    get "$closed" mnist cifar10
    expect "exit" 1 "$rc"
    expect "within 10 s" yes "$([ "$took" -le 10 ] && echo yes || echo "$took s")"
    expect "error lines" 2 "$(grep -c '^error' "$dir/out")"
    expect_word "$closed/train-images.gz could not be reached"
    expect_word "$closed/c10.tar.gz could not be reached"
    expect_word "sudo apt-get install dataset-fashion-mnist"
    expect_word "./cnn --dataset fashion-mnist"
    expect_word "./cnn --dataset synthetic"
    expect_word "login node"
    expect "files" "" "$(files)"
}

no_curl_no_wget_is_said() {
    path_without curl wget
    get "$closed" one
    expect "exit" 1 "$rc"
    expect_word "neither curl nor wget is installed"
}

# ------------------------------------------------- tests against the server

good_download() {
    local file
    get "$url/ok/" mnist
    expect "exit" 0 "$rc"
    for file in train-images train-labels t10k-images t10k-labels; do
        expect_same "mnist/$file.gz" "$tmp/www/$file.gz"
    done
    expect "number of files" 4 "$(files | wc -w | tr -d ' ')"
}

second_run_asks_nothing() {
    get "$url/ok" mnist
    get "$url/ok" mnist
    expect "exit" 0 "$rc"
    expect "requests" 0 "$(requests)"
    expect_word "have  mnist/train-images.gz"
}

damaged_file_is_replaced() {
    get "$url/ok" one
    echo damage >>"$dir/data/one/train-images.gz"
    get "$url/ok" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

resume_sends_range() {
    start_part 7000 "$tmp/www/train-images.gz"
    get "$url/ok" one
    expect "exit" 0 "$rc"
    expect "requests" "ok train-images.gz bytes=7000-" "$(cat "$tmp/log")"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

folder_of_the_files_name() {
    mkdir -p "$dir/data/one/train-images.gz"
    get "$url/ok" one
    expect "exit" 1 "$rc"
    expect_word "$dir/data/one/train-images.gz is a folder, remove it"
    mkdir -p "$dir/data/cifar10/test_batch.bin"
    get "$url/ok" cifar10
    expect "exit for an unpacked file" 1 "$rc"
    expect_word "$dir/data/cifar10/test_batch.bin is a folder, remove it"
}

part_that_is_a_link() {
    mkdir -p "$dir/data/one"
    head -c 7000 "$tmp/www/train-images.gz" >"$dir/elsewhere"
    ln -s ../../elsewhere "$dir/data/one/train-images.gz.part"
    get "$url/ok" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
    expect "link" no "$([ -L "$dir/data/one/train-images.gz" ] && echo yes || echo no)"
    expect "bytes of what it led to" 7000 "$(wc -c <"$dir/elsewhere" | tr -d ' ')"
}

cut_download_is_kept_and_continued() {
    get "$url/cut" one
    expect "exit" 1 "$rc"
    expect "files" "./one/train-images.gz.part " "$(files)"
    get "$url/ok" one
    expect "exit of the second run" 0 "$rc"
    expect "requests" "ok train-images.gz bytes=10000-" "$(cat "$tmp/log")"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

server_without_ranges_starts_over() {
    start_part 7000 "$tmp/www/train-images.gz"
    get "$url/norange" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

server_refusing_range_starts_over() {
    start_part 7000 "$tmp/www/train-images.gz"
    get "$url/refuse" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

useless_part_is_dropped() {
    start_part 7000 "$tmp/www/t10k-images.gz"
    get "$url/ok" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

missing_mirror_keeps_part() {
    start_part 7000 "$tmp/www/train-images.gz"
    get "$url/nowhere $url/ok" one
    expect "exit" 0 "$rc"
    expect "last request" "ok train-images.gz bytes=7000-" "$(tail -n 1 "$tmp/log")"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

corrupt_file_is_refused() {
    get "$url/bad" one
    expect "exit" 1 "$rc"
    expect "files" "" "$(files)"
    expect_word "wrong checksum"
}

next_mirror_after_404() {
    get "$url/nowhere $url/ok" one
    expect "exit" 0 "$rc"
    expect "requests" "nowhere ok" "$(cut -d' ' -f1 "$tmp/log" | paste -sd' ' -)"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

next_mirror_after_corrupt_file() {
    get "$url/bad $url/ok" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

next_mirror_after_closed_port() {
    get "$closed $url/ok" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

silent_server_is_left() {
    get "$url/hang" one
    expect "exit" 1 "$rc"
    expect "requests" 1 "$(requests)"
    expect "within 15 s" yes "$([ "$took" -le 15 ] && echo yes || echo "$took s")"
    expect_word "could not be reached"
}

one_missing_set_exits_1() {
    get "$url/ok" gone one
    expect "exit" 1 "$rc"
    expect_word "error gone: no gone.gz"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

cifar_tar_is_flattened() {
    local file
    get "$url/ok" cifar10
    expect "exit" 0 "$rc"
    for file in data_batch_1 data_batch_2 test_batch; do
        expect_same "cifar10/$file.bin" "$tmp/tar/cifar-10-batches-bin/$file.bin"
    done
    expect "left besides *.bin and the checksums" "" \
        "$(find "$dir/data/cifar10" -mindepth 1 ! -name '*.bin' ! -name '*.md5')"
    get "$url/ok" cifar10
    expect "exit of the second run" 0 "$rc"
    expect "requests of the second run" 0 "$(requests)"
}

damaged_cifar_file_is_replaced() {
    get "$url/ok" cifar10
    echo damage >"$dir/data/cifar10/data_batch_2.bin"
    get "$url/ok" cifar10
    expect "exit" 0 "$rc"
    expect_same cifar10/data_batch_2.bin "$tmp/tar/cifar-10-batches-bin/data_batch_2.bin"
}

macos_md5_serves_too() {
    path_without md5sum
    if command -v md5sum >/dev/null; then
        command_in_path md5 "[ \"\$1\" = -q ] && $(command -v md5sum) | cut -c1-32"
    fi
    get "$url/ok" one
    expect "exit" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
    get "$url/bad" two
    expect "exit for a corrupt file" 1 "$rc"
}

wget_downloads_and_resumes() {
    path_without curl
    start_part 7000 "$tmp/www/train-images.gz"
    get "$url/ok" one two
    expect "exit" 0 "$rc"
    expect "first request" "ok train-images.gz bytes=7000-" "$(head -n 1 "$tmp/log")"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
    expect_same two/train-labels.gz "$tmp/www/train-labels.gz"
}

wget_refuses_what_curl_refuses() {
    path_without curl
    get "$url/bad $url/nowhere $closed" one
    expect "exit" 1 "$rc"
    expect "files" "" "$(files)"
    expect_word "$url/bad/train-images.gz sent a file with a wrong checksum"
    expect_word "$url/nowhere/train-images.gz refused"
    expect_word "$closed/train-images.gz could not be reached"
    start_part 7000 "$tmp/www/t10k-images.gz"
    get "$url/norange" one
    expect "exit after a useless .part" 0 "$rc"
    expect_same one/train-images.gz "$tmp/www/train-images.gz"
}

# ------------------------------------------------------------------ run them

bash=$(command -v bash)
closed=http://127.0.0.1:1 # nothing listens on port 1
make_files
if command -v python3 >/dev/null; then start_server; fi

run() { # "COMMANDS IT NEEDS" TEST...
    local need missing name
    missing=''
    for need in $1; do command -v "$need" >/dev/null || missing="$missing $need"; done
    shift
    for name in "$@"; do
        if [ -n "$missing" ]; then echo "skip get_data/$name: not installed:$missing"; continue; fi
        dir=$tmp/$name wrong='' path=$PATH table=$tmp/table
        mkdir "$dir"
        "$name"
        if [ -z "$wrong" ]; then echo "pass get_data/$name"; else echo "fail get_data/$name:${wrong//$'\n'/ }"; fi
    done
}

run "" no_argument_prints_usage help_exits_0 unknown_name_exits_2 \
    debian_folder_is_used debian_folder_must_be_whole without_INSTALL_only_prints_apt \
    INSTALL_1_installs_the_package INSTALL_1_is_for_fashion_mnist_only no_curl_no_wget_is_said
run "curl" offline_says_what_works
run "curl python3" good_download second_run_asks_nothing damaged_file_is_replaced \
    resume_sends_range folder_of_the_files_name part_that_is_a_link cut_download_is_kept_and_continued \
    server_without_ranges_starts_over server_refusing_range_starts_over \
    useless_part_is_dropped missing_mirror_keeps_part corrupt_file_is_refused \
    next_mirror_after_404 next_mirror_after_corrupt_file next_mirror_after_closed_port \
    silent_server_is_left one_missing_set_exits_1 cifar_tar_is_flattened \
    damaged_cifar_file_is_replaced macos_md5_serves_too
run "wget python3" wget_downloads_and_resumes wget_refuses_what_curl_refuses
exit 0
