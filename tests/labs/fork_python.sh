# Sourced after lib.sh: calls of python programs that cost little more than what these do. Python starts
# once, imports what they need, and forks for each call.
# shellcheck shell=bash disable=SC2034,SC2154 # status is the caller's; tmp and repo are lib.sh's

cat >"$tmp/fork.py" <<'END'
import importlib, os, runpy, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    out, err, *words = line.rstrip("\n").split("\t")
    child = os.fork()
    if child == 0:
        for path, mode, number in ((os.devnull, os.O_RDONLY, 0), (out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1),
                                   (err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 2)):
            os.dup2(os.open(path, mode, 0o666), number)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    status = os.waitpid(child, 0)[1]
    print(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)
END

# start_python PYTHON MODULES...: all calls run in the present folder
start_python() {
    mkfifo "$tmp/calls" "$tmp/replies" || exit 1
    PYTHONPATH=$repo/labs/tools "$1" "$tmp/fork.py" "${@:2}" <"$tmp/calls" >"$tmp/replies" &
    exec 8>"$tmp/calls" 9<"$tmp/replies"
}

# fork_python OUT ERR PROGRAM ARGUMENTS...: sets status
fork_python() {
    (IFS=$'\t' && echo "$*") >&8
    read -r status <&9
}
