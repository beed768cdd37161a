#!/usr/bin/env bash
# Downloads the data sets that ./cnn reads; `data/get_data.sh -h` says how.
#
# A download is written to FILE.part and renamed once its MD5 is correct, so a
# file under its final name is always complete. After an interruption run the
# same command again: it continues the .part.
#
# Environment variables (for tests, or a class with its own server):
#   CNN_DATA_MIRROR  URLs, separated by spaces, instead of mirrors() below
#   CNN_DATA_DIR     target folder, instead of the folder of this script
#   CNN_SYSTEM_DATA  instead of /usr/share/datasets
#   CNN_DATA_TABLE   a file with lines like those of table() below
set -u
export LC_ALL=C

# set|file|md5|bytes ("-" where the size is not known)
table() {
    if [ -n "${CNN_DATA_TABLE:-}" ]; then cat -- "$CNN_DATA_TABLE"; return; fi
    cat <<END
mnist|train-images-idx3-ubyte.gz|f68b3c2dcbeaaa9fbdd348bbdeb94873|9912422
mnist|train-labels-idx1-ubyte.gz|d53e105ee54ea40749a09fcbcd1e9432|28881
mnist|t10k-images-idx3-ubyte.gz|9fb629c4189551a2d022fa330f9573f3|1648877
mnist|t10k-labels-idx1-ubyte.gz|ec29112dd5afa0611ce80d1b7f02629c|4542
fashion-mnist|train-images-idx3-ubyte.gz|8d4fb7e6c68d591d4c3dfef9ec88bf0d|26421880
fashion-mnist|train-labels-idx1-ubyte.gz|25c81989df183df01b3e8a0aad5dffbe|29515
fashion-mnist|t10k-images-idx3-ubyte.gz|bef4ecab320f06d8554ea6380940ec79|4422102
fashion-mnist|t10k-labels-idx1-ubyte.gz|bb300cfdad3c16e7a12a480ee83cd310|5148
cifar10|cifar-10-binary.tar.gz|c32a1d4ab5d03f1284b67883e8d87530|170052171
cifar100|cifar-100-binary.tar.gz|03b5dce01913d631647c71ecec9e9cb8|168513733
END
}

mirrors() { # SET
    if [ -n "${CNN_DATA_MIRROR:-}" ]; then echo "$CNN_DATA_MIRROR"; return; fi
    case $1 in
        mnist) echo "https://ossci-datasets.s3.amazonaws.com/mnist/" \
                    "https://storage.googleapis.com/cvdf-datasets/mnist/" ;;
        fashion-mnist) echo "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/" ;;
        cifar*) echo "https://www.cs.toronto.edu/~kriz/" ;;
    esac
}

rows() { table | awk -F'|' -v set="$1" '$1 == set'; } # SET

md5_of() { # FILE
    if command -v md5sum >/dev/null; then md5sum <"$1" | cut -c1-32; else md5 -q <"$1"; fi
}

md5_is() { [ -f "$1" ] && [ "$(md5_of "$1")" = "$2" ]; } # FILE MD5

# Debian packages only Fashion-MNIST. It recompresses the files, so their
# checksums are not the ones in the table; apt verifies its own.
in_system() { # SET
    local file
    [ "$1" = fashion-mnist ] || return 1
    for file in $(rows "$1" | cut -d'|' -f2); do
        [ -f "$system/$1/$file" ] || return 1
    done
    echo "have  $1: found in $system/$1, where ./cnn reads it; nothing to download"
}

# Leaves a good file in PART, or the reason of the failure in $why; then PART is
# kept only if a later attempt can continue it. The low-speed limit ends a
# connection that is open but sends nothing.
download() { # URL PART MD5
    local code='' rc=0 show
    if command -v curl >/dev/null; then
        show=-s; [ -t 2 ] && show=-#
        code=$(curl -fL "$show" --connect-timeout 5 --speed-limit 100 --speed-time 10 \
            -w '%{http_code}' -C - -o "$2" "$1") || rc=$?
    elif command -v wget >/dev/null; then
        show=-q; [ -t 2 ] && show=--show-progress
        wget -q "$show" --tries=1 --dns-timeout=5 --connect-timeout=5 --read-timeout=10 \
            -c -O "$2" "$1" || rc=wget$?
    else
        why="could not be downloaded: neither curl nor wget is installed; install one of them"
        return 1
    fi
    [ -s "$2" ] || rm -f -- "$2" # wget leaves an empty file when it fails
    case $rc/$code in
        0/*) md5_is "$2" "$3" && return
             why="sent a file with a wrong checksum"; rm -f -- "$2" ;;
        33/* | */416) why="refused to resume"; rm -f -- "$2" ;;
        22/* | wget8/*) why="refused (HTTP ${code:-error})" ;;
        23/* | wget3/*) why="could not be saved: is the disk or the quota full?" ;;
        */2*) why="was interrupted (run the same command again to continue)" ;;
        wget*) why="could not be reached, or was interrupted" ;;
        *) why="could not be reached" ;;
    esac
    return 1
}

# Leaves a good SET/FILE, or lists in $trouble why each mirror failed.
fetch() { # SET FILE MD5 BYTES
    local dest=$root/$1/$2 url base old
    if md5_is "$dest" "$3"; then echo "have  $1/$2"; return; fi
    trouble=" $dest is a folder, remove it;"
    [ ! -d "$dest" ] || return 1
    # A download must not write to what a link leads to, nor wait for the other end of a pipe.
    trouble=" $dest.part is a folder, remove it;"
    { [ -f "$dest.part" ] && [ ! -L "$dest.part" ]; } || rm -f -- "$dest.part" 2>/dev/null || return 1
    trouble=''
    for base in $(mirrors "$1"); do
        url=${base%/}/$2
        echo "get   $url ($4 bytes)"
        old=no; [ -s "$dest.part" ] && old=yes
        # An unusable old .part is not the mirror's fault: try again without it.
        if download "$url" "$dest.part" "$3" ||
            { [ $old = yes ] && [ ! -e "$dest.part" ] && download "$url" "$dest.part" "$3"; }; then
            mv -- "$dest.part" "$dest"; return
        fi
        trouble="$trouble $url $why;"
    done
    return 1
}

# Unpacking may be interrupted too. So the list of the unpacked files' checksums,
# which marks the set as complete for a later run, is written last.
unpack() { # SET TAR
    local tar=$root/$1/$2 tmp=$root/$1/unpack.part file folder
    folder=$(find -L "$root/$1" -mindepth 1 -maxdepth 1 -type d \( -name '*.bin' -o -name '*.md5' \) | head -n 1)
    trouble=" $folder is a folder, remove it;"
    [ -z "$folder" ] || return 1
    rm -rf -- "$tmp"
    if mkdir -- "$tmp" && tar -xzf "$tar" -C "$tmp" &&
        find "$tmp" -type f -name '*.bin' -exec mv -- {} "$root/$1/" \;; then
        for file in "$root/$1"/*.bin; do echo "$(md5_of "$file") ${file##*/}"; done >"$tmp/md5"
        mv -- "$tmp/md5" "$tar.md5" && rm -rf -- "$tmp" "$tar"
    else
        rm -rf -- "$tmp" # its space may be what is missing
        trouble=" $tar could not be unpacked: is the disk or the quota full?"
        return 1
    fi
}

unpacked() { # SET TAR
    local sum file
    { [ -f "$root/$1/$2.md5" ] && [ -s "$root/$1/$2.md5" ]; } || return 1
    while read -r sum file; do
        md5_is "$root/$1/$file" "$sum" || return 1
    done <"$root/$1/$2.md5"
    echo "have  $1/*.bin"
}

get_set() { # SET
    local file md5 bytes missing='' trouble='' why='' fashion='' sudo=''
    in_system "$1" && return
    if ! mkdir -p -- "$root/$1" 2>/dev/null || [ ! -w "$root/$1" ]; then
        echo "error $1: cannot write to $root/$1; CNN_DATA_DIR=DIR data/get_data.sh $1 uses another folder," \
            "where './cnn --data DIR' looks" >&2
        return 1
    fi
    while IFS='|' read -r _ file md5 bytes <&3; do
        case $file in
            *.tar.gz) unpacked "$1" "$file" || { fetch "$1" "$file" "$md5" "$bytes" && unpack "$1" "$file"; } ;;
            *) fetch "$1" "$file" "$md5" "$bytes" ;;
        esac || { missing=$file; break; } # the next file would wait for the same timeouts
    done 3< <(rows "$1")
    [ -z "$missing" ] && return
    rmdir -- "$root/$1" 2>/dev/null # if it is empty

    if [ "$1" = fashion-mnist ] && [ "${INSTALL:-}" = 1 ]; then
        [ "$(id -u)" = 0 ] || sudo=sudo
        $sudo apt-get install -y dataset-fashion-mnist && in_system "$1" && return
    fi
    case $1 in
        *mnist) fashion="'sudo apt-get install dataset-fashion-mnist' and then './cnn --dataset fashion-mnist'; " ;;
    esac
    echo "error $1: no $missing:$trouble without it: $fashion'./cnn --dataset synthetic'" \
        "needs no download; on a cluster, run this on the login node" >&2
    return 1
}

root=${CNN_DATA_DIR:-$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)}
system=${CNN_SYSTEM_DATA:-/usr/share/datasets}
sets=$(table | cut -d'|' -f1 | uniq | paste -sd' ' -)
trap 'echo "interrupted; run the same command again to continue" >&2; exit 130' INT

usage() {
    echo "usage: [INSTALL=1] data/get_data.sh NAME [NAME...]     NAME: $sets"
    echo "Downloads each data set to $root/NAME/. Exit status 0: all of them are complete."
    echo "INSTALL=1 installs Debian's package if fashion-mnist cannot be downloaded."
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
for name in "$@"; do
    case $name in
        -h | --help) usage; exit 0 ;;
        *) [ -n "$(rows "$name")" ] || { echo "error: no data set '$name'; expected one of: $sets" >&2; exit 2; } ;;
    esac
done
status=0
for name in "$@"; do get_set "$name" || status=1; done
exit $status
