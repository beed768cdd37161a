/* report.h - how a test program reports to check.sh: it prints what is wrong to verdict() and exits
   with status 1, or it sends back the token that it has read and exits with status 0. */
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static FILE *verdict_file;

// Descriptor 8, if check.sh has opened it: apart from what the student's code prints. Else stdout.
static FILE *verdict(void) __attribute__((unused));
static FILE *verdict(void) {
    if (!verdict_file)
        verdict_file = fdopen(8, "w");
    if (!verdict_file)
        verdict_file = stdout;
    return verdict_file;
}

// Prints a line and ends the program, whatever its other threads do.
static _Noreturn void wrong(const char *format, ...) __attribute__((format(printf, 1, 2), unused));
static _Noreturn void wrong(const char *format, ...) {
    static bool reported;
    if (__atomic_exchange_n(&reported, true, __ATOMIC_RELAXED))
        for (;;)
            pause(); // another thread is reporting and ends the program
    va_list args;
    va_start(args, format);
    vfprintf(verdict(), format, args);
    va_end(args);
    fputs("\n", verdict());
    fflush(verdict());
    fflush(stdout);
    _exit(1);
}

typedef struct NamedTest {
    const char *name;
    void (*run)(void);
} NamedTest;

// Runs the tests that the arguments name; there is one for each argument.
static void run_named(const NamedTest *, size_t, int, char **) __attribute__((unused));
static void run_named(const NamedTest *tests, size_t count, int argc, char **argv) {
    for (int a = 1; a < argc; a++) {
        size_t t = 0;
        while (t < count && strcmp(argv[a], tests[t].name) != 0)
            t++;
        if (t == count)
            wrong("there is no test \"%s\"", argv[a]);
        tests[t].run();
    }
}

// Reads the checker's token, after the student's parts have finished, and sends it back.
static void send_token(void) __attribute__((unused));
static void send_token(void) {
    char token[64] = "";
    if (!fgets(token, sizeof token, stdin) || write(9, token, strlen(token)) < 0)
        _exit(1);
}
