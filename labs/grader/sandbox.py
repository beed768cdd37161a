"""Runs a command that is not trusted: student code, and programs that read student files. For labs/grade.

Three kinds of isolation; the first that works on this machine is used. labs/INSTRUCTOR.md compares them:

    bwrap     bubblewrap: it sees the system's programs and the folders that it is given, and nothing else; it
              writes to one folder only; no network; when it ends, its processes end
    unshare   the same, by util-linux alone, with the kernel's namespaces
    limits    limits of time, memory, processes and file sizes, and, if labs/grade runs as root, another user.
              It can read what that user can read, and reach the network
"""
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

NOBODY = 65534  # the user of untrusted commands, if labs/grade runs as root
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/etc/alternatives", "/etc/ld.so.cache",
          "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/fonts", "/etc/matplotlibrc", "/sys/devices/system/cpu"]
DEVICES = ["null", "zero", "full", "random", "urandom"]
TEMPORARY_MB = 1024     # of the folder /tmp in the sandbox, which is memory
FILE_MB = 256           # a file's size, the output included
MEMORY_MB = 4096        # of all processes together
PROCESSES = 256
SAID = 200_000          # bytes of the output that are kept
POLL_S = 0.1
GRACE_S = 2             # bubblewrap's own processes end after it
UNKILLABLE_S = 30       # a process that waits for a device cannot be ended
PR_SET_CHILD_SUBREAPER = 36

# Makes a root folder of its own with the folders below, read-only, leaves the machine's, and gives up all
# privileges. Arguments: the new root, the folder to write to, the working folder, the folders to read, `--`,
# the command.
UNSHARE = r"""
set -e
root=$1 write=$2 cwd=$3
shift 3
mount -t tmpfs -o size=16m,mode=755 none "$root"
mkdir -p "$root/proc" "$root/dev" "$root/tmp"
mount -t tmpfs -o "size=${TEMPORARY_MB}m,mode=1777" none "$root/tmp"
bind() {
    if [ -L "$1" ]; then
        mkdir -p "$root$(dirname "$1")"
        ln -s "$(readlink "$1")" "$root$1"
        return
    fi
    if [ -d "$1" ]; then
        mkdir -p "$root$1"
    else
        mkdir -p "$root$(dirname "$1")"
        : >"$root$1"
    fi
    mount --bind "$1" "$root$1" 2>/dev/null || mount --rbind "$1" "$root$1"
}
while [ "$1" != -- ]; do
    bind "$1"
    [ -L "$1" ] || mount -o remount,bind,ro "$root$1" 2>/dev/null || mount -o remount,bind,ro,nosuid,nodev "$root$1"
    shift
done
shift
bind "$write"
for device in $DEVICES; do
    bind "/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mount -t proc proc "$root/proc"
mount -o remount,bind,ro "$root"
cd "$root"
pivot_root . tmp
umount -l /tmp
cd "$cwd"
exec setpriv $USER_OPTIONS --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""
AS_NOBODY = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def is_root():
    return os.geteuid() == 0


def programs():
    """The folders of the system's programs, and those of this Python and of $CC, wherever they are."""
    found = [p for p in SYSTEM if os.path.lexists(p)]
    for path in (sys.base_prefix, sys.prefix, os.path.dirname(compiler()), *os.environ.get("READABLE", "").split(":")):
        if path and not any(path == p or path.startswith(p + "/") for p in found) and path != "/":
            found.append(path)
    return found


def ancestors(path):
    """The folders around it, the outermost first."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[:i + 1]) for i in range(len(parts))]


def compiler():
    path = shutil.which(os.environ.get("CC") or "gcc")
    return os.path.realpath(path) if path else "/usr/bin/gcc"


def bwrap(command, read, write, cwd, _root):
    words = ["--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net",
             "--unshare-uts", "--cap-drop", "ALL"]
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root() else ["--unshare-user"]
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(TEMPORARY_MB << 20), "--tmpfs",
              "/tmp"]
    for path in programs() + [*read, write]:
        words += [word for above in ancestors(path) for word in ("--dir", above)]  # which another user may enter
    for path in programs() + read:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    words += ["--bind", write, write, "--remount-ro", "/", "--"]
    words += ["setpriv", *AS_NOBODY, "--no-new-privs", "--inh-caps=-all", "--"] if is_root() else []
    return [*words, "env", "-C", cwd, *command]  # only now may it enter a folder of that user


def unshare(command, read, write, cwd, root):
    spaces = ["--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]
    options = f"DEVICES={' '.join(DEVICES)}", f"TEMPORARY_MB={TEMPORARY_MB}", "USER_OPTIONS=" + (
        " ".join(AS_NOBODY) if is_root() else "")
    return [*spaces, *([] if is_root() else ["--map-root-user"]), "env", *options, "bash", "-c", UNSHARE, "sandbox",
            root, write, cwd, *programs(), *read, "--", *command]


def limits(command, _read, _write, _cwd, _root):
    options = [*AS_NOBODY, "--bounding-set=-all"] if is_root() else []
    return [*options, "--no-new-privs", "--inh-caps=-all", "--", *command]


# Of each kind: its program, and the function that makes the arguments.
KINDS = {"bwrap": ("bwrap", bwrap), "unshare": ("unshare", unshare), "limits": ("setpriv", limits)}
WEAKER = ("Weaker isolation: neither bubblewrap nor unshare works here, so student code can read the files of this "
          "machine{}, and reach the network. Install bubblewrap (Debian: apt-get install bubblewrap), or grade in a "
          "virtual machine that has nothing else on it.")


def works(kind):
    """Whether this machine has it."""
    with tempfile.TemporaryDirectory() as folder:
        return run(kind, ["true"], [], folder, 20).status == 0


def choose():
    return next(kind for kind in KINDS if works(kind))


def others():
    """At least as many as the processes and threads of this user, which its limit of processes counts."""
    if is_root():
        return 0  # untrusted commands have another user
    with open("/proc/loadavg", encoding="ascii") as f:
        return int(f.read().split()[3].partition("/")[2])


def environment(write, kind):
    """Nothing of the instructor's environment but where programs are."""
    path = [os.path.dirname(compiler()), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    return {"PATH": ":".join(path), "HOME": "/tmp", "TMPDIR": write if kind == "limits" else "/tmp",
            "LC_ALL": "C.UTF-8", "CC": compiler(), "NO_CUDA": "1", "NO_MPI": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": "/tmp"}


# ---- Processes


def descendants():
    """{pid: resident bytes} of all processes below this one."""
    parents, resident = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
                fields = f.read().rpartition(")")[2].split()  # a program's name may contain anything
            parents[int(pid)], resident[int(pid)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    below, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - below
        below |= new
    return {pid: resident[pid] for pid in below}


def end_all(child, stopped):
    """Kills what the command has left behind, and itself if it was stopped; orphans have become children of this
    process. Returns how many there were, without those that were ending by themselves."""
    count, grace = 0, time.monotonic() + (0 if stopped else GRACE_S)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants()
        if not left or time.monotonic() > grace + UNKILLABLE_S:
            break
        if time.monotonic() >= grace:
            count = max(count, len(left))
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    child.returncode = -9 if child.returncode is None else child.returncode
    return count


def watch(child, seconds):
    """Waits for its end; returns the limit that it has reached, or ""."""
    end = time.monotonic() + seconds
    while child.poll() is None:
        if time.monotonic() > end:
            return f"it was stopped after {seconds:g} s"
        below = descendants()
        if sum(below.values()) > MEMORY_MB << 20:
            return f"it was stopped: it used more than {MEMORY_MB} MB of memory"
        if len(below) > PROCESSES:
            return f"it was stopped: it had more than {PROCESSES} processes"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
    return ""


def run(kind, command, read, write, seconds, cwd=None):
    """Runs it with the files in `read` readable and the folder `write` writable, at the paths that they have.

    status: its exit status; stopped: the limit that it reached, or ""; left: processes that it left behind;
    said: the beginning of its output."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = ["prlimit", f"--fsize={FILE_MB << 20}", f"--nproc={PROCESSES + others()}", "--nofile=1024", "--core=0",
               f"--cpu={int(4 * seconds) + 1}", "--", *command]
    if is_root():
        os.chown(write, NOBODY, NOBODY)
    program, arguments = KINDS[kind]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as root:
        words = [shutil.which(program) or program, *arguments(command, read, write, cwd or write, root)]
        try:
            child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                     env=environment(write, kind), start_new_session=True,
                                     cwd=(cwd or write) if kind == "limits" else "/")
        except OSError as error:
            return SimpleNamespace(status=127, stopped="", left=0, said=str(error))
        stopped = "interrupted"
        try:
            stopped = watch(child, seconds)
        finally:
            left = end_all(child, stopped)
        output.seek(0)
        said = output.read(SAID).decode("utf-8", "replace")
    return SimpleNamespace(status=child.returncode, stopped=stopped, left=0 if stopped else left, said=said)
