"""Runs a command that is not trusted: student code, and programs that read student files. For labs/grade.

Two kinds of isolation, which labs/INSTRUCTOR.md compares:

    bwrap     bubblewrap: it sees the system's programs and the folders that it is given, and nothing else; it
              writes to one folder only; no network; when it ends, its processes end
    limits    limits of time, memory, processes, file sizes and disk space, and, if labs/grade runs as root, another
              user. It can read what that user can read, and reach the network
"""
import contextlib
import ctypes
import os
import platform
import re
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
MEMORY_MB = 4096        # of all processes together, with shared memory
DISK_MB = 2048          # that it may write, with files that it has removed but not closed
FILES = 20_000          # that it may make
PROCESSES = 256
SAID = 200_000          # bytes of the output that are kept
POLL_S = 0.1
GRACE_S = 2             # bubblewrap's own processes end after it
UNKILLABLE_S = 30       # a process that waits for a device cannot be ended
PR_SET_CHILD_SUBREAPER = 36
# The system call keyctl() of this machine, and its operation that joins a new session keyring
KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}.get(platform.machine())
JOIN_SESSION_KEYRING = 1
AS_NOBODY = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def is_root():
    return os.geteuid() == 0


def programs():
    """The folders of the system's programs, and those of this Python and of $CC, wherever they are."""
    found = [p for p in SYSTEM if os.path.lexists(p)]
    for path in (sys.base_prefix, sys.prefix, os.path.dirname(compiler()), os.path.dirname(os.path.realpath(compiler())),
                 *os.environ.get("READABLE", "").split(":")):
        if path and not any(path == p or path.startswith(p + "/") for p in found) and path != "/":
            found.append(path)
    return found


def ancestors(path):
    """The folders around it, the outermost first."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[:i + 1]) for i in range(len(parts))]


def compiler():
    """Its path, but not what a link there points to: that may be ccache, which its name tells what to do."""
    path = shutil.which(os.environ.get("CC") or "gcc") or "/usr/bin/gcc"
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def bwrap(command, read, write, cwd):
    words = ["--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net",
             "--unshare-uts", "--cap-drop", "ALL"]
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root() else ["--unshare-user"]
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(TEMPORARY_MB << 20), "--tmpfs",
              "/tmp"]
    seen = list(dict.fromkeys([*programs(), *read, *map(os.path.realpath, read)]))
    for path in [*seen, write]:
        words += [word for above in ancestors(path) for word in ("--dir", above)]  # which another user may enter
    for path in seen:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    words += ["--bind", write, write, "--remount-ro", "/", "--"]
    words += ["setpriv", *AS_NOBODY, "--no-new-privs", "--inh-caps=-all", "--"] if is_root() else []
    return [*words, "env", "-C", cwd, *command]  # only now may it enter a folder of that user


def limits(command, _read, _write, _cwd):
    options = [*AS_NOBODY, "--bounding-set=-all"] if is_root() else []
    return [*options, "--no-new-privs", "--inh-caps=-all", "--", *command]


# Of each kind: its program, and the function that makes the arguments.
KINDS = {"bwrap": ("bwrap", bwrap), "limits": ("setpriv", limits)}


def works(kind):
    """Whether this machine has it."""
    with tempfile.TemporaryDirectory() as folder:
        return run(kind, ["true"], [], folder, 20).status == 0


def others():
    """At least as many as the processes and threads of this user, which its limit of processes counts."""
    if is_root():
        return 0  # untrusted commands have another user
    with open("/proc/loadavg", encoding="ascii") as f:
        return int(f.read().split()[3].partition("/")[2])


def environment(write, kind):
    """Nothing of the instructor's environment but where programs are."""
    path = [os.path.dirname(compiler()), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin",
            os.path.dirname(sys.executable)]  # the checker needs some python3
    return {"PATH": ":".join(path), "HOME": "/tmp", "TMPDIR": write if kind == "limits" else "/tmp",
            "LC_ALL": "C.UTF-8", "CC": compiler(), "CCACHE_DISABLE": "1", "NO_CUDA": "1", "NO_MPI": "1",
            "DEVICE": "emulator", "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": "/tmp"}


# ---- Processes


def descendants():
    """All processes below this one."""
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
                parents[int(pid)] = int(f.read().rpartition(")")[2].split()[1])  # a name may contain anything
    below, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - below
        below |= new
    return below


def private_bytes(pids):
    """Their memory, without what they share with others, such as programs and shared memory."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm", encoding="ascii") as f:
                _, resident, shared = map(int, f.read().split()[:3])
            pages += resident - shared
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_use(write):
    """Of the machine: bytes of shared memory and of the kernel's own, such as for empty files in /tmp; bytes and files
    of the disk of `write`. A command cannot hide what it adds to these, not even in files without a name; other
    programs add to them, too, but hardly as much as the limits."""
    with open("/proc/meminfo", encoding="ascii") as f:
        kilobytes = re.findall(r"^(?:Shmem|SUnreclaim): +(\d+) kB", f.read(), re.M)
    disk = os.statvfs(write)
    return sum(map(int, kilobytes)) << 10, (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_files - disk.f_ffree


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


def reached(write, before):
    """The limit of memory, disk or processes that the processes below this one have reached, or ""."""
    below = descendants()
    shared, disk, files = (now - then for now, then in zip(in_use(write), before))
    shares = {f"{MEMORY_MB} MB of memory": (private_bytes(below) + max(0, shared)) / (MEMORY_MB << 20),
              f"{DISK_MB} MB of disk space": disk / (DISK_MB << 20),
              f"{FILES} files": files / FILES, f"{PROCESSES} processes": len(below) / PROCESSES}
    over = [limit for limit, share in shares.items() if share > 1]
    return f"it was stopped: it used more than {over[0]}" if over else ""


def watch(child, write, seconds):
    """Waits for its end; returns the limit that it has reached, or ""."""
    end, before, stopped = time.monotonic() + seconds, in_use(write), ""
    while child.poll() is None and not stopped:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
        stopped = f"it was stopped after {seconds:g} s" if time.monotonic() > end else reached(write, before)
    return stopped if child.returncode is None else ""


def run(kind, command, read, write, seconds, cwd=None):
    """Runs it with the files in `read` readable and the folder `write` writable, at the paths that they have.

    status: its exit status; stopped: the limit that it reached, or ""; left: processes that it left behind;
    said: the beginning of its output."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if KEYCTL:
        libc.syscall(KEYCTL, JOIN_SESSION_KEYRING, None)  # the children do not get the keys of who grades
    command = ["prlimit", f"--fsize={FILE_MB << 20}", f"--nproc={PROCESSES + others()}", "--nofile=1024", "--core=0",
               f"--cpu={int(4 * seconds) + 1}", "--", *command]
    if is_root():
        os.chown(write, NOBODY, NOBODY)
    program, arguments = KINDS[kind]
    with tempfile.TemporaryFile() as output:
        words = [shutil.which(program) or program, *arguments(command, read, write, cwd or write)]
        try:
            child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                     env=environment(write, kind), start_new_session=True,
                                     cwd=(cwd or write) if kind == "limits" else "/")
        except OSError as error:
            return SimpleNamespace(status=127, stopped="", left=0, said=str(error))
        stopped = "interrupted"
        try:
            stopped = watch(child, write, seconds)
        finally:
            left = end_all(child, stopped)
        output.seek(0)
        said = output.read(SAID).decode("utf-8", "replace")
    return SimpleNamespace(status=child.returncode, stopped=stopped, left=0 if stopped else left, said=said)
