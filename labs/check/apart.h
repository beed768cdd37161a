/* apart.h - a test in two programs, so that a student's code can neither see nor report a result.

   Both are built from the same sources. The checker has the starter's stubs; it draws the inputs,
   computes what is right, compares and reports (report.h). It starts the worker, which has the
   student's parts. They share one piece of memory, at the same address: the checker puts a task and
   its inputs there, the worker leaves what the parts have computed. No right result is ever in the
   worker, and none of the checker's descriptors.

     Shared *shared = SHARED_MEMORY;          // a struct that begins with Apart
     main(): if (is_worker(argc, argv))
                 serve(task);                 // calls task() as often as the checker wants
             start_worker("./lab01", sizeof(Shared));
             ... run_apart() ... */
#pragma once
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct Apart {
    sem_t begin, done;
    void *fault; // the address whose access has ended the worker, or NO_FAULT
} Apart;

#define NO_FAULT ((void *)-1)

// Free in every program, also under the thread sanitizer and with addresses of 39 bits
#define SHARED_MEMORY ((void *)0x1000000000)

/* The checker's functions, in apart.c. Weak, since they are not linked to the worker: its parts
   could start a program with them. */
#define OF_THE_CHECKER __attribute__((weak))

// Starts the worker, which shares the first `bytes` of SHARED_MEMORY.
OF_THE_CHECKER void start_worker(const char *program, size_t bytes);

// Starts a program that has SHARED_FILE, a copy of `file`, instead of memory.
OF_THE_CHECKER pid_t start_apart(const char *program, int file);

// Lets the worker run its task once. Returns NULL, or what ended the worker: "was ended by ...",
// also if it was stopped after PATIENCE_S, or after that many seconds.
OF_THE_CHECKER const char *run_apart(void);
OF_THE_CHECKER const char *run_apart_for(size_t seconds);

/* ---- The worker ------------------------------------------------------------------------------ */

enum { SHARED_FILE = 3 }; // the only descriptor besides the standard ones that it is given

static inline bool is_worker(int argc, char **argv) {
    return argc == 2 && strcmp(argv[1], "apart") == 0;
}

static inline void note_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_code == SEGV_MAPERR || info->si_code == SEGV_ACCERR)
        ((Apart *)SHARED_MEMORY)->fault = info->si_addr;
    signal(number, SIG_DFL); // which ends the program when the access is repeated
}

// Nothing can be opened after this, not even in place of what is closed. WORKER_MAY_OPEN=1 is for
// GPUs, and for the thread sanitizer, which writes its report to a file.
static inline void open_no_more(void) {
    const struct rlimit none = {0, 0};
    if (!getenv("WORKER_MAY_OPEN"))
        setrlimit(RLIMIT_NOFILE, &none);
}

// Calls task() whenever the checker wants it.
static inline _Noreturn void serve(void (*task)(void)) {
    const struct sigaction on_fault = {.sa_sigaction = note_fault, .sa_flags = SA_SIGINFO};
    Apart *const apart = SHARED_MEMORY;
    struct stat file;
    if (fstat(SHARED_FILE, &file) != 0 || mmap(apart, (size_t)file.st_size, PROT_READ | PROT_WRITE,
                                               MAP_SHARED, SHARED_FILE, 0) != apart)
        _exit(1);
    close(SHARED_FILE);
    open_no_more();
    sigaction(SIGSEGV, &on_fault, NULL);
    for (;;) {
        while (sem_wait(&apart->begin) != 0)
            ;
        task();
        fflush(stdout);
        sem_post(&apart->done);
    }
}
