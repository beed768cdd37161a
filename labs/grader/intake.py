"""Copies what a student has handed in, a folder or an archive, and refuses what is no ordinary file. For labs/grade.

The copy has regular files and folders only, of limited number, size and depth. Nothing in it is executable. What
is left out is listed, as pairs (place, reason).

    intake.py ARCHIVE OUT SAID     unpacks a .zip, .tar or .tar.gz to OUT and writes such pairs to SAID, as JSON;
                                   labs/grade calls it in its sandbox, since an archive may be made to break readers
"""
import contextlib
import json
import lzma
import os
import re
import stat
import sys
import tarfile
import zipfile
import zlib

FILE_BYTES = 64 << 20
ALL_BYTES = 512 << 20
ARCHIVE_BYTES = 256 << 20
FILES = 5000
DEPTH = 12
NAME = 200           # characters
# What students need not hand in, and what nothing here reads.
IGNORED = {".git", ".venv", "venv", "env", "build", "__pycache__", "data"}
# What a Mac adds to a folder or an archive
OF_A_MAC = re.compile(r"__MACOSX|\.DS_Store|\._.*", re.S)
# Links to run folders that make report LAB=n makes, or what an archiver has put in their place.
LINKED_RUNS = re.compile(r"(^|/)reports/lab\d\d/lab[^/]*(/|$)")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
MB = 1 << 20


class Full(Exception):
    """The copy has reached a limit; the message says which."""


class Copy:
    """The folder `out` and what has been left out of it."""

    def __init__(self, out):
        self.out, self.left_out, self.files, self.bytes = out, [], 0, 0

    def refuse(self, place, reason):
        if len(self.left_out) < 50:
            self.left_out.append((place, reason))

    def accepts(self, path):
        """Whether a file may have this relative path."""
        parts = path.split("/")
        if any(part in IGNORED or OF_A_MAC.fullmatch(part) for part in parts) or LINKED_RUNS.search(path):
            return False
        if len(parts) > DEPTH or any(len(part) > NAME for part in parts):
            self.refuse(path[:NAME], f"expected at most {DEPTH} folders in each other and names of {NAME} "
                        "characters, found more; not read")
        elif path.startswith("/") or any(part in ("", ".", "..") for part in parts):
            self.refuse(path, "expected a path inside of the folder, found one that leads out of it; not read")
        elif not path.isprintable():
            self.refuse(path, "expected a name of printable characters, found others; not read")
        else:
            return True
        return False

    def write(self, path, source):
        """Copies a file object; its size is counted here, whatever its header says."""
        target, size = os.path.join(self.out, path), 0
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.lexists(target):
            os.remove(target)  # tar -r has added a newer one to the archive
        self.files += 1
        if self.files > FILES:
            raise Full(f"expected at most {FILES} files, found more; the others were not read")
        with open(target, "xb") as to:
            while piece := source.read(MB):
                size, self.bytes = size + len(piece), self.bytes + len(piece)
                if size > FILE_BYTES or self.bytes > ALL_BYTES:
                    break
                to.write(piece)
        if size > FILE_BYTES:
            os.remove(target)
            self.refuse(path, f"expected a file of at most {FILE_BYTES // MB} MB, found a larger one; not read")
        if self.bytes > ALL_BYTES:
            raise Full(f"expected at most {ALL_BYTES // MB} MB in all, found more; the rest was not read")


def find_tops(given):
    """The folders with a student's files: `given`, or those in it, since students may have packed their folder instead
    of its contents, or unpacked and packed it again. run_autograder takes the first by a similar rule."""
    inside = sorted(entry.path for entry in os.scandir(given) if entry.is_dir(follow_symlinks=False))
    known = [folder for folder in [given, *inside]
             if any(os.path.exists(os.path.join(folder, name)) for name in ("cnn.c", "cnn_kernels.cu", "runs", "labs"))]
    if given in known:
        return [given]
    return find_tops(inside[0]) if not known and len(inside) == 1 else known


def archive_in(folder):
    """The only archive in a folder, as some learning platforms export submissions, if it has nothing else of a lab."""
    if find_tops(folder):
        return None
    archives = [entry.path for entry in os.scandir(folder)
                if entry.is_file(follow_symlinks=False) and entry.name.endswith(ARCHIVES)]
    return archives[0] if len(archives) == 1 else None


# ---- Folders

KINDS = [(stat.S_ISLNK, "symbolic link"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"),
         (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device")]


def kind_of(mode):
    return next((name for test, name in KINDS if test(mode)), "special file")


def copy_file(copy, path, name, folder):
    """Opens it without following a link, or waiting for the other end of a pipe."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as source:
        about = os.fstat(source.fileno())
        if not stat.S_ISREG(about.st_mode):
            copy.refuse(path, f"expected an ordinary file, found a {kind_of(about.st_mode)}; not read")
        elif about.st_size > FILE_BYTES:
            copy.refuse(path, f"expected a file of at most {FILE_BYTES // MB} MB, found {about.st_size // MB} MB; "
                        "not read")
        else:
            copy.write(path, source)


def copy_below(copy, above, folder):
    """Copies what is in an open folder; `above` is its path, which ends in / if there is one."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = above + name
        try:
            about = os.lstat(name, dir_fd=folder)
            if not copy.accepts(path):
                continue
            if stat.S_ISDIR(about.st_mode):
                inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
                try:
                    copy_below(copy, path + "/", inner)
                finally:
                    os.close(inner)
            elif stat.S_ISREG(about.st_mode):
                copy_file(copy, path, name, folder)
            else:
                found = kind_of(about.st_mode)
                if stat.S_ISLNK(about.st_mode):
                    found += f" to {os.readlink(name, dir_fd=folder)}"
                copy.refuse(path, f"expected an ordinary file, found a {found}; not read")
        except OSError as error:
            copy.refuse(path, f"expected a file that can be read, found: {error.strerror}; not read")


def copy_folder(source, out):
    """Copies a folder; returns what was left out."""
    copy = Copy(out)
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        copy_below(copy, "", folder)
    except Full as why:
        copy.refuse(".", str(why))
    finally:
        os.close(folder)
    return copy.left_out


# ---- Archives


def members_of_zip(archive):
    for member in archive.infolist():
        mode = member.external_attr >> 16
        odd = None if member.is_dir() or stat.S_IFMT(mode) in (0, stat.S_IFREG) else kind_of(mode)
        name = member.filename.replace("\\", "/")  # as Windows PowerShell 5 writes it
        if not name.endswith("/"):
            yield name, odd, member.file_size, lambda m=member: archive.open(m)


def members_of_tar(archive):
    for member in archive:
        odd = None if member.isreg() else "link" if member.issym() or member.islnk() else "special file"
        if not member.isdir():
            yield member.name, odd, member.size, lambda m=member: archive.extractfile(m)


def unpack(archive, out):
    """Unpacks it; returns what was left out."""
    copy = Copy(out)
    try:
        is_zip = archive.endswith(".zip")
        with zipfile.ZipFile(archive) if is_zip else tarfile.open(archive, "r|*") as opened:
            for name, odd, size, source in members_of_zip(opened) if is_zip else members_of_tar(opened):
                name = name[2:] if name.startswith("./") else name
                if not copy.accepts(name):
                    continue
                if odd:
                    copy.refuse(name, f"expected an ordinary file, found a {odd}; not read")
                elif size > FILE_BYTES:
                    copy.refuse(name, f"expected a file of at most {FILE_BYTES // MB} MB, found {size // MB} MB; not "
                                "read")
                else:
                    with contextlib.closing(source()) as file:
                        copy.write(name, file)
    except Full as why:
        copy.refuse(os.path.basename(archive), str(why))
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, zipfile.BadZipFile, tarfile.TarError,
            zlib.error, lzma.LZMAError) as error:
        copy.refuse(os.path.basename(archive), f"expected an archive, found a damaged one ({error!r}); the rest of it "
                    "was not read")
    return copy.left_out


def main(archive, out, said):
    left_out = unpack(archive, out)
    with open(said, "w", encoding="utf-8", errors="replace") as f:
        json.dump(left_out, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
