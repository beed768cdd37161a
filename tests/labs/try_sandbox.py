"""Tries to break out of each kind of isolation of labs/grader/sandbox.py, for grade_test.py."""
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import threading

import sandbox

# Each prints `done` if it succeeds in what it must not do. {canary}: a folder that everybody may write to, {secret}: a
# file there, {port}: a server on this machine.
ATTACKS = {
    "writes_outside": "echo x >{canary}/written && echo done",
    "changes_what_it_reads": "echo x >>{given}/file && echo done",
    "removes_what_it_reads": "rm -f {given}/file; [ -e {given}/file ] || echo done",
    "reads_another_file": "grep -q secret {secret} && echo done",
    "uses_the_network": "(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo done",
    "sees_other_processes": "kill -0 {pid} && echo done",
    "ends_other_processes": "kill -9 {pid} && echo done",
    "sees_the_environment": "[ -n \"$SECRET\" ] && echo done; grep -qa SECRET /proc/{pid}/environ && echo done",
    "gains_privileges": "mount -t tmpfs none /tmp && echo done; mount -o remount,rw / && echo done; chroot / id && "
                        "echo done",
    "gains_them_in_a_new_namespace": "unshare -Urm bash -c 'mount -o remount,bind,rw {given}; echo x >>{given}/file' && "
                                     "echo done",
    "writes_system_files": "echo x >>/etc/hosts && echo done; touch /usr/x && echo done",
}
# Prints `done` if it finds a key that the session of this program has.
FINDS_A_KEY = r"""echo '#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {{
    return syscall(SYS_request_key, "user", "{key}", NULL, 0) > 0 ? !puts("done") : 1;
}}' >key.c && ${{CC:-gcc}} key.c -o key && ./key"""
# Writes 2 x 200 MB to memory that has no name, then waits.
HIDDEN_MEMORY = r"""echo '#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>
int main(void) {
    static char data[1 << 20];
    for (int i = 0, file = -1; i < 400; i++) {
        file = i % 200 ? file : memfd_create("hidden", 0);
        if (write(file, data, sizeof data) < 0)
            return 1;
    }
    return (int)sleep(9);
}' >memory.c && $CC memory.c -o memory && ./memory"""
# Makes empty files in /tmp for ten seconds.
EMPTY_FILES = r"""echo '#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main(void) {
    char name[32];
    for (time_t end = time(NULL) + 60; time(NULL) < end;) { // ends sooner where it is stopped
        static int i;
        snprintf(name, sizeof name, "/tmp/%d", i++);
        close(open(name, O_CREAT | O_WRONLY, 0600));
    }
}' >files.c && $CC files.c -o files && ./files"""
# What the weakest kind does not prevent, as labs/INSTRUCTOR.md says. It also shows that these attacks work.
NOT_BY_LIMITS = {"writes_outside", "reads_another_file", "uses_the_network"}


def attack(kind, command, given, write, seconds=20):
    return sandbox.run(kind, ["bash", "-c", command], [given], write, seconds)


def serve():
    """A port of this machine that accepts connections."""
    server = socket.create_server(("127.0.0.1", 0))
    def accept():
        while True:
            server.accept()[0].close()
    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def try_attacks(verdict, kind, made, given, write):
    canary, secret = os.path.join(made, "canary"), os.path.join(made, "secret")
    os.environ["SECRET"] = "secret"
    with open(secret, "w", encoding="utf-8") as f:
        f.write("secret\n")
    os.chmod(canary, 0o777)
    words = dict(canary=canary, secret=secret, given=given, port=serve(), pid=os.getpid())
    for name, command in ATTACKS.items():
        if kind == "limits" and not (name in NOT_BY_LIMITS or sandbox.is_root()):
            continue  # it has no user of its own
        with open(os.path.join(given, "file"), "w", encoding="utf-8") as f:
            f.write("given\n")
        done = attack(kind, command.format(**words), given, write)
        succeeds = kind == "limits" and name in NOT_BY_LIMITS
        verdict(f"{kind}/{name}", "done" if succeeds else "not done", done,
                ("done" in done.said.split()) == succeeds and not done.stopped)
        with open(os.path.join(given, "file"), encoding="utf-8") as f:
            verdict(f"{kind}/{name}/unchanged", "given", "", f.read() == "given\n")
    verdict(f"{kind}/canary", "written only by limits", os.listdir(canary),
            bool(os.listdir(canary)) == (kind == "limits"))
    for name in os.listdir(canary):
        os.remove(os.path.join(canary, name))


def try_keys(verdict, kind, given, write):
    """A key of the session of who grades, which any program of that user can read."""
    libc, session_keyring = ctypes.CDLL(None, use_errno=True), -3
    words = FINDS_A_KEY.format(key=f"cnn {kind} {os.getpid()}")
    add_key = sandbox.KEYCTL and sandbox.KEYCTL - 2
    if not add_key or libc.syscall(add_key, b"user", words.split('"')[3].encode(), b"secret", 6, session_keyring) < 0:
        print(f"skip grade/{kind}/keys: this system has none for us", flush=True)
        return
    done = subprocess.run(["bash", "-c", words], cwd=write, capture_output=True, text=True, check=False)
    verdict(f"{kind}/keys/attack", "done", done, done.stdout == "done\n")
    for name in ("key", "key.c"):
        os.remove(os.path.join(write, name))
    done = attack(kind, words, given, write)
    verdict(f"{kind}/keys", "not done", done, done.status == 1 and "done" not in done.said)


def try_disk(verdict, kind, given, write):
    """Disk space and files that it makes, whether it keeps them or not."""
    sandbox.DISK_MB, before = 200, sandbox.DISK_MB
    for name, command in (("kept", "for i in {1..40}; do head -c 50M /dev/zero >$i; sleep 0.1; done"),
                          ("removed", "for i in {10..50}; do eval \"exec $i>$i\"; rm $i; head -c 50M /dev/zero >&$i; "
                           "sleep 0.1; done")):
        done = attack(kind, command, given, write)
        verdict(f"{kind}/disk/{name}", "stopped", done, "200 MB of disk space" in done.stopped)
        subprocess.run(f"rm -rf {write}/*", shell=True, check=True)
    sandbox.DISK_MB = before
    if os.statvfs(write).f_files == 0:
        print(f"skip grade/{kind}/files: this file system does not count them", flush=True)
        return
    sandbox.FILES, before = 3000, sandbox.FILES
    done = attack(kind, "for ((i = 0; i < 200000; i++)); do : >$i; done", given, write)
    verdict(f"{kind}/files", "stopped", done, "3000 files" in done.stopped)
    sandbox.FILES = before
    subprocess.run(f"find {write} -type f -delete", shell=True, check=True)


def try_limits(verdict, kind, given, write):
    done = attack(kind, "while :; do :; done", given, write, 1)
    verdict(f"{kind}/endless", "stopped after 1 s", done, "after 1 s" in done.stopped)
    done = attack(kind, "(setsid bash -c 'while :; do sleep 0.1; done' &); sleep 0.3; echo $PPID", given, write)
    verdict(f"{kind}/leaves_a_process", "ended", done, not sandbox.descendants())
    sandbox.PROCESSES, before = 40, sandbox.PROCESSES
    done = attack(kind, "bomb() { for i in 1 2 3 4 5 6 7 8; do bomb & done; sleep 5; }; bomb", given, write, 20)
    verdict(f"{kind}/forks", "stopped, or without more processes", done,
            done.stopped or done.status or "fork" in done.said)
    verdict(f"{kind}/forks/ended", "no process", sandbox.descendants(), not sandbox.descendants())
    sandbox.PROCESSES = before
    sandbox.MEMORY_MB, before = 200, sandbox.MEMORY_MB
    done = attack(kind, "head -c 1G /dev/zero | tail -c 1G | wc -c; sleep 1", given, write)
    verdict(f"{kind}/memory", "stopped", done, "200 MB of memory" in done.stopped)
    done = attack(kind, HIDDEN_MEMORY, given, write)
    verdict(f"{kind}/hidden_memory", "stopped", done, "200 MB of memory" in done.stopped)
    if kind == "bwrap":  # whose /tmp is memory
        sandbox.MEMORY_MB = 100
        done = attack(kind, EMPTY_FILES, given, write, 80)
        verdict(f"{kind}/empty_files", "stopped", done, "100 MB of memory" in done.stopped)
    sandbox.MEMORY_MB = before
    sandbox.FILE_MB, before = 1, sandbox.FILE_MB
    done = attack(kind, "head -c 3M /dev/zero >file; wc -c <file; rm file; yes | head -c 3M", given, write)
    verdict(f"{kind}/large_file", "at most 1 MB", done.said[:100], len(done.said) <= sandbox.SAID and
            "3145728" not in done.said)
    sandbox.FILE_MB = before


def try_use(verdict, kind, given, write):
    """What it has to allow."""
    done = attack(kind, f"cat {given}/file && echo made >{write}/made && echo 'int main(void) {{ return 0; }}' >a.c && "
                  "$CC a.c -o a && ./a && cat <(echo piped)", given, write, 60)
    link = os.path.join(write, "link")
    os.symlink(given, link)
    linked = sandbox.run(kind, ["cat", f"{link}/file"], [link], write, 20)
    verdict(f"{kind}/use/link", "given", linked, linked.said == "given\n")
    os.remove(link)
    verdict(f"{kind}/use", "given, compiled, piped", done, done.said.split() == ["given", "piped"] and not done.status)
    verdict(f"{kind}/use/written", "made", os.listdir(write), os.path.exists(os.path.join(write, "made")))


def test_kind(verdict, kind, made, quick):
    if not sandbox.works(kind):
        print(f"skip grade/{kind}: it does not work on this machine", flush=True)
        return
    given, write = tempfile.mkdtemp(dir=made), tempfile.mkdtemp(dir=made)
    os.chmod(given, 0o755)
    with open(os.path.join(given, "file"), "w", encoding="utf-8") as f:
        f.write("given\n")
    os.chmod(os.path.join(given, "file"), 0o644)
    try_use(verdict, kind, given, write)
    try_attacks(verdict, kind, made, given, write)
    try_keys(verdict, kind, given, write)
    if not quick:
        try_limits(verdict, kind, given, write)
        try_disk(verdict, kind, given, write)
    shutil.rmtree(given)
    shutil.rmtree(write)


def test_all(verdict, made, quick):
    kinds = ["bwrap" if sandbox.works("bwrap") else "limits"] if quick else sandbox.KINDS
    for kind in kinds:
        test_kind(verdict, kind, made, quick)
