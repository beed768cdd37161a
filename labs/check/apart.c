/* apart.c - the checker's side of apart.h */
#define _GNU_SOURCE 1
#include "apart.h"
#include "report.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

enum { MOST_DESCRIPTORS = 256, PATIENCE_S = 60 };

static pid_t worker;

static Apart *shared(void) {
    return SHARED_MEMORY;
}

static _Noreturn void become_worker(const char *program, int file) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(file, SHARED_FILE);
    close(0);
    open("/dev/null", O_RDONLY);
    for (int other = SHARED_FILE + 1; other < MOST_DESCRIPTORS; other++)
        close(other);
    execl(program, program, "apart", (char *)NULL);
    _exit(127);
}

pid_t start_apart(const char *program, int file) {
    prctl(PR_SET_DUMPABLE, 0); // no access to this process through /proc
    fflush(stdout);
    const pid_t process = fork();
    if (process < 0)
        wrong("cannot start a process");
    if (process == 0)
        become_worker(program, file);
    return process;
}

void start_worker(const char *program, size_t bytes) {
    const int memory = memfd_create("apart", 0);
    if (memory < 0 || ftruncate(memory, (off_t)bytes) != 0)
        wrong("no memory for %zu bytes", bytes);
    if (mmap(shared(), bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0) != shared())
        wrong("the memory at %p is in use", SHARED_MEMORY);
    shared()->fault = NO_FAULT;
    sem_init(&shared()->begin, 1, 0);
    sem_init(&shared()->done, 1, 0);
    worker = start_apart(program, memory);
    close(memory);
}

// What a signal usually means
static const char *hint(int number) {
    if (number == SIGSEGV)
        return ": an access outside of an array?";
    return number == SIGABRT ? "; see below" : "";
}

static const char *how_it_ended(int status) {
    static char text[160];
    if (WIFEXITED(status))
        snprintf(text, sizeof text, "ended its program with exit status %d instead of returning",
                 WEXITSTATUS(status));
    else if ((size_t)shared()->fault < 65536)
        snprintf(text, sizeof text,
                 "accessed a number of an array that does not exist: its pointer is NULL");
    else
        snprintf(text, sizeof text, "was ended by signal %d (%s)%s", WTERMSIG(status),
                 strsignal(WTERMSIG(status)), hint(WTERMSIG(status)));
    return text;
}

// Whether the task is done within a tenth of a second
static bool is_done_soon(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100 * 1000 * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(&shared()->done, &until) == 0;
}

const char *run_apart(void) {
    return run_apart_for(PATIENCE_S);
}

const char *run_apart_for(size_t seconds) {
    int status;
    sem_post(&shared()->begin);
    for (size_t tenths = 0; tenths < 10 * seconds; tenths++) {
        if (is_done_soon())
            return NULL;
        if (waitpid(worker, &status, WNOHANG) == worker)
            return how_it_ended(status);
    }
    kill(worker, SIGKILL);
    return "does not return: an endless loop?";
}
